"""Whatever a step gives of a request, one token or several: an engine whose decodes have drafts
says what one without them says."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from jaxllm.cache.pool import Lifetime, PagePool
from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.constraints.grammars import Grammars
from jaxllm.engine.engine import Engine
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.plan import Limits
from jaxllm.engine.scheduling.request import Request
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.startup.started import Started
from jaxllm.grammar.matcher import GrammarError, Matcher, Matchers, vocabulary
from jaxllm.messages import GenerateRequest, TextDelta
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.fake_device import EOS, VOCAB, FakeDevice, digests, draw
from tests.engine.fake_host import Optimist
from tests.engine.fake_runner import FakeRunner
from tests.server.fake import RESOLVED

PAGE = 4
MAX_LEN = 64
# One token for the end, some that are whole words, some that begin a character of two bytes
LETTERS = [*"abcdefghijklmnopqrst", "Ġ", "Ã", "©"]
WORDS = ["ab", "cd", "Ġa", "efg", "hi", "Ã©", "Ġhi"]
# The first leaves many ways, the second forces long runs, the third ends by itself
GRAMMARS = ["([a-t]| ){1,40}", "(ab|cd)+efghijklm(n|o)+pqrst", "a?b?c?d?e?f?g?h?"]


@functools.cache
def tokenizer() -> Tokenizer:
    """A token for each id of the fake device's vocabulary."""
    texts = ["<eos>", *LETTERS, *WORDS]
    texts += [chr(ord("A") + i) for i in range(VOCAB - len(texts))]
    ids = {text: number for number, text in enumerate(texts)}
    merges = [("a", "b"), ("c", "d"), ("Ġ", "a"), ("h", "i"), ("Ã", "©"), ("Ġ", "hi")]
    made = Tokenizer(BPE(ids, merges))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens(["<eos>"])
    return made


@functools.cache
def grammar_tokens() -> LLTokenizer:
    """The same tokens for grammars."""
    return vocabulary(tokenizer(), VOCAB, [EOS])


@functools.cache
def allowed(grammar: str, output: tuple[int, ...]) -> list[int]:
    """The tokens that a grammar allows after an output; the end after one that does not follow."""
    matcher = Matcher(grammar, grammar_tokens())
    bits_W = np.full(matcher.mask_words, 2**32 - 1, np.uint32)
    try:
        matcher.accept_tokens(output)
        matcher.apply_mask(bits_W)
    except GrammarError:
        return [EOS]
    return [token for token in range(VOCAB) if bits_W[token // 32] >> token % 32 & 1] or [EOS]


@dataclass(frozen=True)
class Setup:
    """An engine. `inputs` of a decode at most; one but for drafts."""

    inputs: int
    pages: int
    windows: tuple[int | None, ...]
    depth: int
    overlaps: bool


@dataclass(frozen=True)
class Job:
    """A request: its prompt, its options, its grammar, turns before it arrives, and turns from its
    arrival to its abort."""

    prompt: list[int]
    params: SamplingParams
    grammar: str | None
    gap: int
    abort: int | None


@dataclass
class Said:
    """What became of a choice."""

    tokens: list[int]
    text: str = ""
    logprobs: bytes = b""
    end: tuple[Any, ...] = ()

    def add(self, delta: TextDelta) -> None:
        """Its next delta."""
        assert not self.end
        self.tokens += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs or b""
        if delta.finish_reason is not None:
            self.end = delta.finish_reason, delta.stop_reason, delta.error, delta.error_param


def engine_of(setup: Setup, grammars: dict[str, str]) -> Engine:
    """`grammars` by request id: what the device draws follows them."""

    def choose(request: Request, tokens: list[int]) -> int:
        digest = digests(tokens)[-1]
        output = tuple(tokens[len(request.prompt.tokens) :])
        token = draw(digest, 0 if request.params.temperature == 0 else request.seed)
        if request.id in grammars:
            choices = allowed(grammars[request.id], output)
            return choices[token % len(choices)]
        while token in request.stops and len(output) < request.params.min_tokens:
            token = (token + 1) % VOCAB
        return token

    buckets = Buckets.build(4, 24, "cpu")
    groups = [
        Lifetime(window, 24, decoded=setup.inputs * (1 + setup.depth)) for window in setup.windows
    ]
    pools = [PagePool(setup.pages, PAGE, PrefixIndex(PAGE, b"test"), group) for group in groups]
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=MAX_LEN)
    scheduler = Scheduler(limits, pools, buckets)
    scheduler.estimator = Optimist()
    drafts = setup.inputs - 1
    device = FakeDevice(PAGE, groups, drafts, choose=choose)
    if drafts:
        scheduler.attach_drafts(lambda request: drafts)
    resolved = replace(
        RESOLVED,
        async_scheduling=setup.overlaps,
        vocab_size=VOCAB,
        max_model_len=MAX_LEN,
        max_num_seqs=4,
        page_size=PAGE,
        max_logprobs=3,
        eos_ids=(EOS,),
    )
    source: Any = None  # no weights are read
    front: Any = SimpleNamespace(backend=tokenizer())
    matchers = Grammars(Matchers(tokenizer(), VOCAB, [EOS]), VOCAB, [EOS])
    runner = FakeRunner(device, buckets, setup.inputs, setup.depth)
    parts = Started(resolved, runner, front, matchers, source, lambda: None)
    return Engine(parts, scheduler, seed=0)


def run(setup: Setup, jobs: list[Job]) -> dict[tuple[str, int], Said]:
    """What an engine says. Its pages are checked after every turn."""
    grammars = {str(i): job.grammar for i, job in enumerate(jobs) if job.grammar is not None}
    engine = engine_of(setup, grammars)
    said: dict[tuple[str, int], Said] = {}
    aborts: dict[int, list[str]] = {}
    turn = 0

    def step() -> None:
        nonlocal turn
        for request_id in aborts.pop(turn, []):
            engine.abort(request_id)
        for delta in engine.step():
            said.setdefault((delta.id, delta.index), Said([])).add(delta)
        engine.scheduler.check()
        turn += 1

    for number, job in enumerate(jobs):
        for _ in range(job.gap):
            step()
        engine.add(
            GenerateRequest(
                id=str(number),
                prompt=Prompt(job.prompt),
                params=job.params,
                grammar=job.grammar,
            )
        )
        if job.abort is not None:
            aborts.setdefault(turn + job.abort, []).append(str(number))
    while engine.has_work or aborts:
        step()
        assert turn < 3000, "requests do not end"
    assert not engine.requests.ids
    assert engine.stats().free_pages == engine.stats().num_pages
    return said


BASE = [(7 * i) % (VOCAB - 1) + 1 for i in range(40)]


@st.composite
def jobs(draw_: st.DrawFn) -> Job:
    """Requests of every sort, whose prompts share prefixes."""
    prompt = BASE[: draw_(st.integers(1, 14))] + draw_(st.lists(st.integers(1, 3), max_size=3))
    grammar = draw_(st.sampled_from([None, None, *GRAMMARS]))
    most = draw_(st.integers(1, 30))
    pieces = st.sampled_from(["a", "b", "ab", "hi", "é", "cde", "t a", "qq", "ij"])
    params = SamplingParams(
        n=draw_(st.sampled_from([1, 1, 1, 2, 3])),
        temperature=draw_(st.sampled_from([0.0, 1.0])),
        seed=draw_(st.integers(0, 5)),
        max_tokens=most,
        min_tokens=0 if grammar else draw_(st.sampled_from([0, 0, min(3, most)])),
        stop=draw_(st.lists(pieces, max_size=3)),
        include_stop_str_in_output=draw_(st.booleans()),
        stop_token_ids=None if grammar else draw_(st.lists(st.integers(1, 9), max_size=2)),
        logprobs=draw_(st.sampled_from([None, None, 0, 2])),
    )
    abort = draw_(st.none() | st.none() | st.integers(0, 12))
    return Job(
        prompt,
        params,
        None if grammar is None else LLMatcher.grammar_from_regex(grammar),
        draw_(st.integers(0, 3)),
        abort,
    )


setups = st.builds(
    Setup,
    inputs=st.just(3),
    pages=st.sampled_from([16, 17, 20, 40, 100]),
    windows=st.sampled_from([(None,), (None,), (5,), (None, 6)]),
    depth=st.integers(1, 2),
    overlaps=st.booleans(),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setups, st.lists(jobs(), min_size=1, max_size=7))
def test_decodes_with_drafts_say_what_decodes_of_one_token_say(
    setup: Setup, work: list[Job]
) -> None:
    one_by_one = run(replace(setup, inputs=1), work)
    at_once = run(setup, work)
    assert at_once.keys() == one_by_one.keys()
    for key, said in at_once.items():
        wanted = one_by_one[key]
        if work[int(key[0])].abort is None:
            assert said == wanted
        else:
            shorter = min(len(said.tokens), len(wanted.tokens))
            assert said.tokens[:shorter] == wanted.tokens[:shorter]


def test_drafts_save_steps_and_a_step_says_several_tokens() -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    steps: dict[int, int] = {}
    said: list[list[int]] = []
    for inputs in (1, 3):
        engine = engine_of(Setup(inputs, 40, (None,), 1, True), {})
        engine.add(GenerateRequest(id="r", prompt=Prompt(BASE[:5]), params=params))
        deltas = []
        while engine.has_work:
            deltas += engine.step()
        steps[inputs] = engine.stats().steps
        said.append([token for delta in deltas for token in delta.token_ids])
        assert max(len(delta.token_ids) for delta in deltas) == inputs
    assert said[0] == said[1] and len(said[0]) == 30
    assert steps[3] < 0.7 * steps[1]
