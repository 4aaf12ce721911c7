"""Flags of scripts for other servers: without effect, or refused with what serves instead."""

from __future__ import annotations

import pytest

from jaxllm.server.command_line.accepted import ACCEPTED
from jaxllm.server.command_line.flags import parser
from jaxllm.server.command_line.options import parse

# `vllm serve` flags that its users know, old and new
KNOWN = """
--model --tokenizer --tokenizer-mode --revision --tokenizer-revision --code-revision
--trust-remote-code --dtype --max-model-len --seed --served-model-name --quantization -q
--load-format --download-dir --hf-token --hf-overrides --safetensors-load-strategy
--generation-config --override-generation-config --enforce-eager --max-logprobs --logprobs-mode
--skip-tokenizer-init --runner --model-impl --logits-processors --gpu-memory-utilization
--device-memory-utilization --kv-cache-memory-bytes --block-size --kv-cache-dtype
--enable-prefix-caching --no-enable-prefix-caching --prefix-caching-hash-algo
--num-gpu-blocks-override --cpu-offload-gb --kv-offloading-size --max-num-seqs
--max-num-batched-tokens --enable-chunked-prefill --no-enable-chunked-prefill
--long-prefill-token-threshold --scheduling-policy --async-scheduling --no-async-scheduling
--stream-interval --max-num-queued-reqs --max-num-queued-tokens --watermark --max-num-active-seqs
--scheduler-cls --tensor-parallel-size -tp --data-parallel-size -dp --pipeline-parallel-size -pp
--enable-expert-parallel -ep --decode-context-parallel-size --nnodes -n --node-rank -r
--master-addr --master-port --distributed-executor-backend --compilation-config -cc
--cudagraph-capture-sizes --optimization-level --enable-lora --max-loras --max-lora-rank
--max-cpu-loras --lora-modules --structured-outputs-config --reasoning-parser
--speculative-config --spec-method --spec-model --spec-tokens --host --port --uds --api-key
--chat-template --chat-template-content-format --default-chat-template-kwargs --response-role
--enable-auto-tool-choice --tool-call-parser --tool-parser-plugin --allowed-origins
--allowed-methods --allowed-headers --root-path --middleware --enable-request-id-headers
--disable-fastapi-docs --uvicorn-log-level --disable-uvicorn-access-log
--disable-access-log-for-endpoints --return-tokens-as-token-ids --enable-prompt-tokens-details
--enable-force-include-usage --enable-per-request-metrics --sse-keep-alive-interval
--fingerprint-mode --api-server-count -asc --headless --config --disable-log-stats
--enable-log-requests --max-log-len --kv-cache-metrics --custom-histogram-buckets
--enable-server-load-tracking --jit-monitor-mode --log-level --logging-config --profiler-config
--enable-reasoning --swap-space --guided-decoding-backend --num-scheduler-steps
--disable-log-requests --preemption-mode --task --device --rope-scaling --rope-theta
--speculative-model --worker-use-ray --use-v2-block-manager --max-seq-len-to-capture
--lora-dtype --lora-extra-vocab-size --long-lora-scaling-factors --fully-sharded-loras
--enable-prompt-adapter --max-prompt-adapters --max-prompt-adapter-token --enable-prompt-embeds
--spec-decoding-acceptance-method --speculative-max-model-len --speculative-disable-by-batch-size
--guided-decoding-disable-fallback --guided-decoding-disable-any-whitespace
--guided-decoding-disable-additional-properties --cuda-graph-sizes --tokenizer-pool-size
--quantization-param-path --worker-cls --additional-config --data-parallel-size-local
--disable-hybrid-kv-cache-manager --disable-mm-preprocessor-cache --mm-processor-cache-gb
""".split()


def test_every_flag_that_users_know_is_known() -> None:
    flags = {flag for action in parser()._actions for flag in action.option_strings}
    assert set(KNOWN) <= flags


def test_no_flag_is_both_ours_and_anothers() -> None:
    flags = [flag for action in parser()._actions for flag in action.option_strings]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--enable-reasoning"], "--enable-reasoning has no effect: see --reasoning-parser"),
        (["--num-scheduler-steps", "8"], "--num-scheduler-steps has no effect"),
        (["-O", "3"], "--optimization-level has no effect: every shape is compiled at start"),
        (["--disable-access-log-for-endpoints", "/health,/metrics"], "has no effect"),
        (["--structured-outputs-config", '{"backend": "auto"}'], "grammars are llguidance's"),
        (["--no-enable-lora"], "--no-enable-lora has no effect"),
        (["--distributed-executor-backend", "mp"], "--nnodes over several hosts"),
        (["--trust-remote-code"], "code from a repository is never run"),
    ],
)
def test_a_flag_without_effect_is_told_in_the_log(argv: list[str], says: str) -> None:
    assert says in "\n".join(parse(argv, {}).notices)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--task", "embed"], "--task embed is not supported here: say --runner"),
        (["--rope-theta", "1e6"], "--hf-overrides"),
        (["--max-num-active-seqs", "9"], "is not supported here: --max-num-seqs"),
        (["--enable-lora"], "--enable-lora is not supported here: adapters"),
        (["--lora-modules", "a=b", "c=d"], "--lora-modules a=b c=d is not supported here"),
        (["--headless"], "one process speaks HTTP"),
        (["--structured-outputs-config", '{"backend": "outlines"}'], "llguidance"),
        (["--worker-use-ray"], "--tensor-parallel-size splits a model over devices"),
        (["--speculative-config", '{"method": "ngram"}'], "speculative decoding"),
        (["--middleware", "os.system"], "code of others is never run"),
        (["--profiler-config"], "--profiler-dir"),
        (["--guided-decoding-backend", "outlines"], "grammars are llguidance's"),
        (["--cpu-offload-gb", "4"], "quantization makes weights smaller"),
        (["--guided-decoding-disable-any-whitespace"], "structured_outputs.disable_any_whitespace"),
    ],
)
def test_a_flag_with_an_effect_is_refused_with_what_serves_instead(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        parse(argv, {})
    assert exit.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_help_says_refused_of_what_is_refused() -> None:
    for accepted in ACCEPTED.values():
        taken = accepted.values is None or "true" in accepted.values
        if accepted.switch and not taken:
            assert accepted.help.startswith("refused: ")
    assert ACCEPTED["enable-lora"].help.startswith("refused: ")


def test_what_is_named_as_a_remedy_exists() -> None:
    flags = {flag for action in parser()._actions for flag in action.option_strings}
    for name, accepted in ACCEPTED.items():
        for word in accepted.note.replace("(", " ").replace(",", " ").split():
            assert not word.startswith("--") or word.rstrip(";") in flags, name
