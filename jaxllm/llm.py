"""Offline use: `LLM(model).generate(prompts, SamplingParams(...))`, with vLLM's argument and result
names."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxllm.config import NEUTRAL_ARGUMENTS, ConfigError, EngineConfig, check_neutral
from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime.profile import Profiler
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.startup.report import ConsoleReport
from jaxllm.grammar.checker import Checker, special_tokens
from jaxllm.grammar.structure import StructureError
from jaxllm.messages import EngineStats, GenerateRequest, RequestError
from jaxllm.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    OutputBuilder,
    RequestOutput,
    nameless,
)
from jaxllm.sampling.beams import BeamSearchParams
from jaxllm.sampling.defaults import generation_config, sampling_defaults
from jaxllm.sampling.options import SamplingParams
from jaxllm.sampling.processor_arguments import Function
from jaxllm.sampling.values import OptionError
from jaxllm.tokenizer import Tokenizer, template_text

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput"]

logger = logging.getLogger("jaxllm")

type Prompt = str | Sequence[int] | Mapping[str, Any]
type Message = Mapping[str, Any]


class LLM:
    """A model in this process. Keyword arguments are the fields of `EngineConfig`; usable several
    times in one process, in whose caches JAX leaves each one's programs (`jax.clear_caches()` gives
    that memory back). Calls of several threads take turns. `chat_template` is the text or the file
    of a chat template that replaces the model's own. `logits_processors` are JAX functions that are
    compiled into the engine for requests that name them (`jaxllm.sampling.processors`).

    Raises ConfigError when the configuration cannot work, RequestError or OptionError when a
    request cannot.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        chat_template: str | None = None,
        logits_processors: Sequence[Function] = (),
        **arguments: Any,
    ):
        self.config = EngineConfig(model=model, **engine_arguments(arguments))
        template = None if chat_template is None else template_text(chat_template)
        self.engine = Engine.from_config(self.config, ConsoleReport(), logits_processors)
        self._ids = itertools.count()
        self._profiler = Profiler(self.config.profiler_dir)
        self._turn, self._caller = threading.Lock(), 0
        if template is not None:
            self._tokenizer().hf.chat_template = template

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer. Raises ConfigError with `skip_tokenizer_init`."""
        return self._tokenizer().hf

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (generation_config.json)."""
        return SamplingParams(**self._defaults)

    @functools.cached_property
    def _defaults(self) -> dict[str, Any]:
        return sampling_defaults(generation_config(self.engine.resolved.model_dir))

    def get_metrics(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return self.engine.stats()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every cached prefix; True when that was possible, which it is between calls. See
        `Engine.reset_prefix_cache`."""
        return self.engine.reset_prefix_cache(reset_running_requests)

    def start_profile(self) -> None:
        """Trace everything until `stop_profile` into `profiler_dir`. Raises ConfigError without
        one, and while a trace is running."""
        self._profiler.start()

    def stop_profile(self) -> None:
        """End the trace and write it. Raises ConfigError when none is running."""
        self._profiler.stop()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: text, token ids, {"prompt": …} or {"prompt_token_ids": …}; one params
        for all or one each. Order is kept. `priority`, one for each prompt, goes before that of the
        params. A prompt given as a dict may hold a "cache_salt": only prompts with an equal one
        share cached prefixes.

        A request that cannot be raises RequestError or OptionError before any runs. One that fails
        while it runs (its logits are not finite, its grammar explodes) takes no other with it: its
        choices have the finish_reason "error", and say why in `error`."""
        items = as_list(prompts)
        inputs = [self._tokenized(prompt) for prompt in items]
        salts = [
            prompt.get("cache_salt") if isinstance(prompt, Mapping) else None for prompt in items
        ]
        params = self._params(sampling_params, len(inputs))
        if priority is not None:
            if len(priority) != len(inputs):
                raise RequestError(
                    f"{len(inputs)} prompts but {len(priority)} priorities; give one for each prompt",
                    "priority",
                )
            params = [
                replace(one, priority=rank) for one, rank in zip(params, priority, strict=True)
            ]
        return self._run(inputs, params, use_tqdm, salts)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, `params.beam_width` of them, best first, as
        transformers finds them. At most `concurrency_limit` prompts are searched at once, where
        that is given."""
        if not isinstance(params, BeamSearchParams):
            raise RequestError(
                f"params must be BeamSearchParams, got {type(params).__name__}", "params"
            )
        if concurrency_limit is not None and (
            type(concurrency_limit) is not int or concurrency_limit < 1
        ):
            raise RequestError(
                f"concurrency_limit must be a whole number from 1, got {concurrency_limit!r:.80}",
                "concurrency_limit",
            )
        items, outputs = as_list(prompts), []
        limit = concurrency_limit or max(1, len(items))
        for start in range(0, len(items), limit):
            outputs += self.generate(
                items[start : start + limit], params.sampling(), use_tqdm=use_tqdm
            )
        return [
            BeamSearchOutput([self._sequence(output, choice, params) for choice in output.outputs])
            for output in outputs
        ]

    def _sequence(
        self, output: RequestOutput, choice: CompletionOutput, params: BeamSearchParams
    ) -> BeamSearchSequence:
        prompt, tokenizer = output.prompt_token_ids, self.engine.tokenizer
        return BeamSearchSequence(
            tokens=prompt + choice.token_ids,
            logprobs=choice.logprobs or [],
            cum_logprob=choice.cumulative_logprob or 0.0,
            text=tokenizer.decode(prompt, params.skip_special_tokens) + choice.text
            if tokenizer is not None
            else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            error=choice.error,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. `chat_template` (a text or a file) is used in place
        of the model's own for this call, and the four arguments before it go to the template. Each
        result's `prompt` is the rendered conversation, decoded from its ids."""
        template = None if chat_template is None else template_text(chat_template)
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(
                "a conversation must be a list of messages, each a dict with role and content",
                "messages",
            )
        conversations: list[Any] = (
            [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        )
        for conversation in conversations:
            check_conversation(conversation)
        inputs: list[tuple[str | None, list[int]]] = []
        for conversation in conversations:
            ids = self._tokenizer().chat(
                [dict(message) for message in conversation],
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs,
                chat_template=template,
            )
            inputs.append((self._tokenizer().decode(ids, skip_special_tokens=False), ids))
        return self._run(
            inputs, self._params(sampling_params, len(inputs)), use_tqdm, [None] * len(inputs)
        )

    def _tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise ConfigError("this needs a tokenizer; construct LLM without skip_tokenizer_init")
        return self.engine.tokenizer

    def _tokenized(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), token_ids(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise RequestError(
                    "a prompt given as a dict needs prompt or prompt_token_ids", "prompt"
                )
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise RequestError(
                    "the prompt holds half of a surrogate pair, which is no text", "prompt"
                ) from None
            return prompt, self._tokenizer().encode(prompt)
        return None, token_ids(prompt)

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None:
            return [self.get_default_sampling_params()] * count
        if not isinstance(given, (SamplingParams, Sequence)):
            raise RequestError(
                f"sampling_params must be SamplingParams, one or one for each prompt, got {type(given).__name__}",
                "sampling_params",
            )
        params = [given] * count if isinstance(given, SamplingParams) else list(given)
        if len(params) != count:
            raise RequestError(
                f"{count} prompts but {len(params)} sampling_params; give one, or one for each prompt",
                "sampling_params",
            )
        for one in {id(p): p for p in params}.values():
            if not isinstance(one, SamplingParams):
                raise RequestError(
                    f"sampling_params must be SamplingParams, got {type(one).__name__}",
                    "sampling_params",
                )
            one.__post_init__()  # its fields may have been set since
        return params

    def _grammars(self, params: list[SamplingParams]) -> list[str | None]:
        """Of each its structured output, compiled. Raises OptionError."""
        wanted = {id(p): p.structured_outputs for p in params if p.structured_outputs is not None}
        if not wanted:
            return [None] * len(params)
        checker = self._checker
        try:
            found = {key: checker.check(structure) for key, structure in wanted.items()}
        except StructureError as error:
            raise OptionError("structured_outputs", f"structured_outputs: {error}") from None
        finally:
            checker.close()
        return [found.get(id(p)) for p in params]

    @functools.cached_property
    def _checker(self) -> Checker:
        return Checker(special_tokens(self._tokenizer().backend))

    def _run(
        self,
        inputs: list[tuple[str | None, list[int]]],
        params: list[SamplingParams],
        use_tqdm: bool,
        salts: list[str | None],
    ) -> list[RequestOutput]:
        """Run requests while no other thread does. Raises RequestError for a call from within
        another, in a host logits processor, say."""
        if self._caller == threading.get_ident():
            raise RequestError(
                "this LLM is in the middle of a call of this thread, which cannot wait for another; use a second LLM"
            )
        with self._turn:
            self._caller = threading.get_ident()
            try:
                return self._run_alone(inputs, params, use_tqdm, salts)
            finally:
                self._caller = 0

    def _run_alone(
        self,
        inputs: list[tuple[str | None, list[int]]],
        params: list[SamplingParams],
        use_tqdm: bool,
        salts: list[str | None],
    ) -> list[RequestOutput]:
        """Feed the engine as its queue has room, until every request has ended; an error or
        interrupt aborts what is left."""
        longest = self.engine.resolved.max_model_len
        grammars = self._grammars(params)
        requests = [
            GenerateRequest(
                id=f"offline-{next(self._ids)}",
                prompt_token_ids=p.truncated(ids, longest),
                params=p if grammar is None else replace(p, structured_outputs=None),
                cache_salt=salt,
                grammar=grammar,
            )
            for (_, ids), p, salt, grammar in zip(inputs, params, salts, grammars, strict=True)
        ]
        for request in requests:
            self.engine.check(request)
        text_of = self.engine.tokenizer.token_text if self.engine.tokenizer else nameless
        outputs = {
            r.id: OutputBuilder(r, text, text_of)
            for r, (text, _) in zip(requests, inputs, strict=True)
        }
        in_order = (
            self.engine.resolved.scheduling_policy == "fcfs"
            and type(self.engine.scheduler) is Scheduler
        )
        bar = tqdm(
            total=len(requests),
            desc="Processed prompts",
            unit="prompt",
            disable=not use_tqdm,
            dynamic_ncols=True,
        )
        try:
            with resting_heap():
                queue = iter(requests)
                waiting = next(queue, None)
                while waiting is not None or self.engine.has_work:
                    # The device begins with the first step's worth of tokens; the others come while
                    # it computes.
                    left = (
                        self.engine.resolved.max_num_batched_tokens
                        if in_order and not self.engine.has_work
                        else math.inf
                    )
                    while waiting is not None and left > 0 and self.engine.has_room(waiting):
                        entered, waiting = waiting, next(queue, None)
                        self.engine.enter(entered)
                        if waiting is not None and left < math.inf:
                            left -= self.engine.uncached(entered)
                    for delta in self.engine.step():
                        if outputs[delta.id].add(delta):
                            bar.update()
        except BaseException:
            for request in requests:
                self.engine.abort(request.id)
            self._drain()
            raise
        finally:
            bar.close()
        found = [outputs[r.id].output for r in requests]
        failed = [
            choice.error
            for output in found
            for choice in output.outputs
            if choice.error is not None
        ]
        if failed:
            logger.warning(
                "%d choices failed (finish_reason error), the first with: %s",
                len(failed),
                failed[0],
            )
        return found

    def _drain(self) -> None:
        """Finish what is on the device, so that the next call starts clean."""
        while self.engine.has_work:
            self.engine.step()


@contextlib.contextmanager
def resting_heap() -> Iterator[None]:
    """What exists now is left out of garbage collections meanwhile: JAX keeps a million objects or
    so, and to look through them takes longer than steps. (What somebody has frozen before is
    collected again afterwards.)"""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def engine_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The EngineConfig fields among vLLM's LLM arguments. Raises ConfigError on an unknown one, or
    on a value that would be ignored."""
    known = {f.name for f in fields(EngineConfig)}
    out = {}
    for name, value in arguments.items():
        if name in known:
            out[name] = value
        elif name not in NEUTRAL_ARGUMENTS:
            raise ConfigError(f"LLM has no argument {name!r}")
        else:
            check_neutral(name, value, f"{name}={value!r}")
    return out


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts must be text, token ids, dicts or a list of them, got {type(prompts).__name__}",
            "prompt",
        )
    items = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    if not isinstance(items, list):
        raise RequestError(
            f"prompts must be text, token ids, dicts or a list of them, got one number, {items!r:.80}",
            "prompt",
        )
    return [items] if items and isinstance(items[0], (int, np.integer)) else items


def check_conversation(messages: Any) -> None:
    """Raises RequestError unless each message has a role and content that is text: what a template
    may drop without a word is refused."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError(
            "a conversation must be a list of messages, each a dict with role and content",
            "messages",
        )
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"message {at} must be a dict with a role and content, got {message!r:.80}",
                "messages",
            )
        content = message.get("content")
        parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
        wrong = [
            part
            for part in parts
            if not (isinstance(part, Mapping) and isinstance(part.get("text"), str))
        ]
        if wrong or not (content is None or isinstance(content, (str, Sequence))):
            shown = f"{wrong[0] if wrong else content!r}"
            raise RequestError(
                f"the content of message {at} must be text, or a list of parts with text, got {shown:.80}",
                "messages",
            )


def token_ids(ids: Any) -> list[int]:
    """Token ids from a list, tuple or array; the engine checks each. Raises RequestError on
    anything else."""
    if isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Iterable):
        raise RequestError(
            f"a prompt must be text or token ids, got {type(ids).__name__}", "prompt"
        )
    found = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    return np.asarray(found).tolist() if found and isinstance(found[0], np.integer) else found
