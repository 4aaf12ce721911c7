"""Offline use: `LLM(model).generate(prompts, SamplingParams(...))`. Arguments and results have
vLLM's names; docs/llm.md describes them."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxllm.cache.events import KVEventBatch
from jaxllm.chat_template import TemplateInput, check_template, template_text
from jaxllm.config import EngineConfig
from jaxllm.engine.intake.validation import generating
from jaxllm.engine.load import load_engine
from jaxllm.engine.runtime.profile import Profiler
from jaxllm.engine.startup.report import ConsoleReport
from jaxllm.grammar.checker import Checker, special_tokens
from jaxllm.grammar.structure import StructureError
from jaxllm.library.driver import Driver
from jaxllm.library.inputs import (
    Message,
    PromptType,
    as_list,
    cache_salt,
    check_beam_arguments,
    conversations_of,
    engine_arguments,
    params_of,
    text_or_ids,
    with_priorities,
)
from jaxllm.library.outputs import (
    BeamSearchOutput,
    CompletionOutput,
    Logprob,
    OutputBuilder,
    RequestOutput,
    beam_output,
    nameless,
)
from jaxllm.library.pooling import PoolingCalls
from jaxllm.locate import locate
from jaxllm.messages import GenerateRequest
from jaxllm.metrics import Metric, engine_metrics
from jaxllm.prompt import Prompt
from jaxllm.sampling.defaults import generation_config, sampling_defaults
from jaxllm.sampling.options import BeamSearchParams, SamplingParams
from jaxllm.sampling.processor_arguments import Function
from jaxllm.sampling.values import OptionError
from jaxllm.weights import GivenArrays

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput"]

logger = logging.getLogger("jaxllm")

# A prompt's text, where it has one, its ids, and its cache salt
type Input = tuple[str | None, list[int], str | None]


class LLM(PoolingCalls):
    """A model in this process. Calls of several threads take turns.

    A process may hold several. What is an LLM's goes with it: memory, threads, processes and
    files.

    Args:
        model: a directory, a Hugging Face id, or "demo", the built-in model.
        chat_template: the text or the file of a template in place of the model's own.
        logits_processors: JAX functions that are compiled into the engine, for requests that name
            them (`jaxllm.sampling.processors`).
        arguments: fields of `EngineConfig`, or vLLM's arguments with their neutral values.

    Raises:
        ConfigError: the configuration cannot work.
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
        template = None
        if chat_template is not None:
            template = template_text(chat_template)
        if template is not None:
            check_template(template)
        self.engine = load_engine(self.config, ConsoleReport(), logits_processors)
        self._driver = Driver(self.engine)
        self._ids = itertools.count()
        self._profiler = Profiler(self.config.profiler_dir)
        if template is not None:
            self._reader().hf.chat_template = template
        elif self.engine.tokenizer is not None:
            self.engine.tokenizer.check_chat_template()

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer. Raises ConfigError with `skip_tokenizer_init`."""
        return self._reader().hf

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (generation_config.json)."""
        return SamplingParams(**self._defaults)

    @functools.cached_property
    def _defaults(self) -> dict[str, Any]:
        return sampling_defaults(generation_config(self.engine.resolved.model_dir))

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges of the engine: objects of `jaxllm.metrics` with name, labels and
        value, as vLLM's."""
        return engine_metrics(self.engine.stats(), self.config.model)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every cached prefix. Returns whether that was possible, which it is between calls.
        See `Engine.reset_prefix_cache`."""
        return self.engine.reset_prefix_cache(reset_running_requests)

    def on_kv_events(self, listener: Callable[[KVEventBatch], None]) -> None:
        """Call `listener` after each step with the pages that entered and left the prefix cache.

        Batches come in order, from the thread that runs the engine; an exception fails the step.
        Raises ValueError without prefix caching.
        """
        self.engine.scheduler.events.listen(listener)

    def sleep(self, level: int = 1) -> None:
        """Free the device memory of weights, KV pages and cached prefixes. At level 1 the weights
        wait in host memory, at level 2 they are read again. Raises ValueError for another level."""
        self.engine.sleeper.sleep(level)

    def wake_up(self) -> None:
        """Take the memory again. Nothing is compiled."""
        self.engine.sleeper.wake_up()

    def update_weights(self, model: str | Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Take other weights of the same shapes in place of those of now. Nothing is compiled;
        cached prefixes are forgotten. Raises ConfigError when they do not fit; nothing has changed
        then.

        Args:
            model: a checkpoint, as a directory or a Hugging Face id; or arrays of NumPy or JAX in
                host memory, as a mapping or pairs, with the names and shapes of the checkpoint's
                tensors. They must stay as they are until this returns.
        """
        if isinstance(model, str):
            self.engine.sleeper.update_weights(locate(model, None, self.config.download_dir))
        else:
            self.engine.sleeper.update_weights(GivenArrays(model))

    def start_profile(self) -> None:
        """Start a trace, which `stop_profile` writes into `profiler_dir`. Raises ConfigError
        without that directory, and while another trace runs."""
        self._profiler.start()

    def stop_profile(self) -> None:
        """End the trace and write it. Raises ConfigError when none runs."""
        self._profiler.stop()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; results are in their order.

        A request that fails while it runs (its logits are not finite, its grammar takes too long)
        does not affect others. Its choices have the finish_reason "error" and the reason in
        `error`.

        Args:
            prompts: each is text, token ids, or a dict with "prompt" or "prompt_token_ids". A dict
                may hold a "cache_salt": only prompts with an equal one share cached prefixes.
            sampling_params: one for all prompts, or one each; None for the model's defaults.
            use_tqdm: show a progress bar.
            priority: one for each prompt, in place of that of the params.

        Raises:
            RequestError, OptionError: a request cannot run; none has started.
        """
        inputs = [self._tokenized(prompt) for prompt in as_list(prompts)]
        params = self._params(sampling_params, len(inputs))
        if priority is not None:
            params = with_priorities(params, priority)
        return self._run(inputs, params, use_tqdm)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `params.beam_width` most likely continuations of each prompt, best first, as
        transformers finds them.

        Args:
            prompts: as of `generate`.
            params: of all searches.
            use_tqdm: show a progress bar.
            concurrency_limit: how many prompts are searched at once; None for all.

        Raises:
            RequestError, OptionError: as `generate`.
        """
        check_beam_arguments(params, concurrency_limit)
        items = as_list(prompts)
        outputs = []
        limit = concurrency_limit or max(1, len(items))
        for start in range(0, len(items), limit):
            outputs += self.generate(
                items[start : start + limit], params.sampling(), use_tqdm=use_tqdm
            )
        return [beam_output(output, self._decoded_prompt(output, params)) for output in outputs]

    def _decoded_prompt(self, output: RequestOutput, params: BeamSearchParams) -> str | None:
        tokenizer = self.engine.tokenizer
        ids = output.prompt_token_ids
        if tokenizer is None:
            return None
        return tokenizer.decode(ids, params.skip_special_tokens)

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
        """Answer conversations; results are in their order. Each one's `prompt` is the rendered
        conversation, decoded from its ids.

        Args:
            messages: one conversation, a list of dicts with "role" and "content", or several.
            sampling_params: as of `generate`.
            use_tqdm: show a progress bar.
            tools: functions in OpenAI's form, for the template.
            chat_template_kwargs: variables of the template; those it does not read are dropped.
                `documents` are texts to answer from, each a dict.
            add_generation_prompt: whether the template starts the assistant's message.
            continue_final_message: whether the last message is continued.
            chat_template: the text or file of a template for this call.

        Raises:
            RequestError, OptionError: as `generate`.
            TemplateError: the template refused a conversation or failed on it.
        """
        template = None
        if chat_template is not None:
            template = template_text(chat_template)
        variables = dict(chat_template_kwargs or {})
        documents = variables.pop("documents", None)
        inputs: list[Input] = []
        for conversation in conversations_of(messages):
            template_input = TemplateInput(
                messages=[dict(message) for message in conversation],
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=variables,
            )
            ids = self._reader().chat(template_input, chat_template=template)
            inputs.append((self._reader().decode(ids, skip_special_tokens=False), ids, None))
        return self._run(inputs, self._params(sampling_params, len(inputs)), use_tqdm)

    def _tokenized(self, prompt: PromptType) -> Input:
        text, ids = text_or_ids(prompt)
        if ids is None:
            ids = self._reader().encode(text or "")
        return text, ids, cache_salt(prompt)

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        return params_of(self.get_default_sampling_params() if params is None else params, count)

    def _grammars(self, params: list[SamplingParams]) -> list[str | None]:
        """The compiled structured output of each, None without one. Raises OptionError."""
        wanted = {id(p): p.structured_outputs for p in params if p.structured_outputs is not None}
        if not wanted:
            return [None] * len(params)
        checker = self._checker
        try:
            compiled = {key: checker.compile_params(structure) for key, structure in wanted.items()}
        except StructureError as error:
            raise OptionError("structured_outputs", f"structured_outputs: {error}") from None
        finally:
            checker.end_processes()
        return [compiled.get(id(p)) for p in params]

    @functools.cached_property
    def _checker(self) -> Checker:
        return Checker(special_tokens(self._reader().backend))

    def _run(
        self, inputs: list[Input], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        """Run requests while no other thread does."""
        with self._driver.turn():
            requests = self._requests(inputs, params)
            text_of = self.engine.tokenizer.token_text if self.engine.tokenizer else nameless
            outputs = {
                r.id: OutputBuilder(r, text, text_of)
                for r, (text, *_) in zip(requests, inputs, strict=True)
            }
            self._driver.run(requests, lambda d: outputs[d.id].add_delta(d), use_tqdm)
        results = [outputs[r.id].output for r in requests]
        failed = [choice.error for output in results for choice in output.outputs if choice.error]
        if failed:
            logger.warning(
                "%d choices failed (finish_reason error), the first with: %s",
                len(failed),
                failed[0],
            )
        return results

    def _requests(self, inputs: list[Input], params: list[SamplingParams]) -> list[GenerateRequest]:
        """The engine's requests, all checked."""
        limit = self.engine.resolved.max_model_len
        grammars = self._grammars(params)
        requests = (
            GenerateRequest(
                id=f"offline-{next(self._ids)}",
                prompt=Prompt(p.truncated(ids, limit)),
                params=p,
                cache_salt=salt,
                grammar=grammar,
            )
            for (_, ids, salt), p, grammar in zip(inputs, params, grammars, strict=True)
        )
        return [generating(self.engine.validate(request)) for request in requests]
