"""JSON schemas of replies."""

from __future__ import annotations

from jaxllm.server.openapi.schema import (
    ANY,
    BOOL,
    IDS,
    INTEGER,
    NUMBER,
    OBJECT,
    STRING,
    Schema,
    array,
    either,
    field,
    form,
    one_of,
    ref,
)

SIZES = (
    "tp_size pp_size dp_size max_model_len max_num_seqs block_size num_gpu_blocks "
    "max_total_num_tokens"
).split()


def full(**members: Schema) -> Schema:
    """An object that has all these members."""
    return form(members, **members)


def const(value: str | bool) -> Schema:
    """That value."""
    return {"const": value}


FINISH = field(one_of(("stop", "length", "tool_calls", "abort", "error")))
STOP = field({"type": ["integer", "string"]}, "The stop string or token id that ended the text.")
RENDERED = full(
    request_id=STRING,
    token_ids=IDS,
    model=STRING,
    sampling_params=OBJECT,
    stream=BOOL,
    cache_salt=field(STRING),
)
CARD = form(
    ("id", "object", "created", "owned_by"),
    id=STRING,
    object=const("model"),
    type=const("model"),
    display_name=STRING,
    created=INTEGER,
    created_at=STRING,
    lifecycle=const("active"),
    owned_by=STRING,
    root=STRING,
    parent=field(STRING),
    max_model_len=INTEGER,
    max_input_tokens=INTEGER,
    permission=array(ANY),
    description=STRING,
    examples=array(STRING),
    default_parameters=OBJECT,
    thinking_switch=BOOL,
    family=STRING,
    dtype=STRING,
)
ANSWER = ("id", "object", "created", "model", "system_fingerprint", "usage", "choices")
CHOICE = ("index", "logprobs", "finish_reason", "stop_reason")
OFFER = OBJECT | {"description": "What to send with the prompt to the server that continues it."}
VECTOR = either(array(NUMBER), STRING)
HEAD = {
    "id": STRING,
    "model": STRING,
    "usage": full(prompt_tokens=INTEGER, total_tokens=INTEGER),
}


def listed(object_type: str, **members: Schema) -> Schema:
    """A list of such objects, one for each prompt."""
    data = array(full(index=INTEGER, object=const(object_type), **members))
    return full(**HEAD, object=const("list"), created=INTEGER, data=data)


REPLIES: dict[str, Schema] = {
    "Error": full(error=full(message=STRING, type=STRING, param=field(STRING), code=field(STRING))),
    "AnthropicError": full(
        type=const("error"), error=full(type=STRING, message=STRING), request_id=field(STRING)
    ),
    "Usage": form(
        ("prompt_tokens", "completion_tokens", "total_tokens"),
        prompt_tokens=INTEGER,
        completion_tokens=INTEGER,
        total_tokens=INTEGER,
        prompt_tokens_details=form(cached_tokens=INTEGER),
        completion_tokens_details=form(reasoning_tokens=INTEGER),
    ),
    "Completion": form(
        ANSWER,
        kv_transfer_params=OFFER,
        id=STRING,
        object=const("text_completion"),
        created=INTEGER,
        model=STRING,
        system_fingerprint=STRING,
        usage=ref("Usage"),
        choices=array(
            form(
                (*CHOICE, "text"),
                index=INTEGER,
                text=STRING,
                logprobs=field(OBJECT),
                finish_reason=FINISH,
                stop_reason=STOP,
                token_ids=IDS,
                prompt_token_ids=IDS,
            )
        ),
    ),
    "ChatCompletion": form(
        ANSWER,
        kv_transfer_params=OFFER,
        id=STRING,
        object=const("chat.completion"),
        created=INTEGER,
        model=STRING,
        system_fingerprint=STRING,
        usage=ref("Usage"),
        prompt_token_ids=IDS,
        choices=array(
            form(
                (*CHOICE, "message"),
                index=INTEGER,
                message=form(
                    ("role", "content"),
                    role=STRING,
                    content=field(STRING),
                    refusal=field(STRING),
                    reasoning=field(STRING),
                    reasoning_content=field(STRING),
                    tool_calls=array(ref("ToolCall")),
                ),
                logprobs=field(OBJECT),
                finish_reason=FINISH,
                stop_reason=STOP,
                token_ids=IDS,
            )
        ),
    ),
    "ToolCall": full(
        id=STRING, type=const("function"), function=full(name=STRING, arguments=STRING)
    ),
    "AnthropicReply": full(
        id=STRING,
        type=const("message"),
        role=const("assistant"),
        model=STRING,
        content=array(ref("Block")),
        stop_reason=one_of(("end_turn", "max_tokens", "stop_sequence", "tool_use")),
        stop_sequence=field(STRING),
        usage=form(
            ("input_tokens", "output_tokens"),
            input_tokens=INTEGER,
            output_tokens=INTEGER,
            cache_creation_input_tokens=INTEGER,
            cache_read_input_tokens=INTEGER,
            output_tokens_details=form(thinking_tokens=INTEGER),
        ),
    ),
    "Block": either(
        full(type=const("text"), text=STRING),
        full(type=const("thinking"), thinking=STRING, signature=STRING),
        full(type=const("tool_use"), id=STRING, name=STRING, input=OBJECT),
    ),
    "TokenCount": full(input_tokens=INTEGER),
    "RenderedCompletion": array(RENDERED),
    "RenderedChat": RENDERED,
    "Generated": either(full(text=array(STRING)), ref("SglangChoice"), array(ref("SglangChoice"))),
    "SglangChoice": full(
        text=STRING,
        output_ids=IDS,
        meta_info=full(
            id=STRING,
            finish_reason=field(OBJECT),
            prompt_tokens=INTEGER,
            completion_tokens=INTEGER,
            cached_tokens=INTEGER,
            e2e_latency=NUMBER,
        ),
    ),
    "Embeddings": listed("embedding", embedding=VECTOR),
    "Pooled": listed("pooling", data=either(array(NUMBER), array(array(NUMBER)), STRING)),
    "CohereEmbeddings": form(
        ("id", "embeddings", "meta", "response_type"),
        id=STRING,
        embeddings=form(
            float=array(array(NUMBER)),
            base64=array(STRING),
            binary=array(array(INTEGER)),
            ubinary=array(array(INTEGER)),
        ),
        texts=array(STRING),
        meta=full(
            api_version=full(version=STRING),
            billed_units=full(input_tokens=INTEGER, image_tokens=INTEGER),
        ),
        response_type=const("embeddings_by_type"),
    ),
    "Classes": full(
        **HEAD,
        object=const("list"),
        created=INTEGER,
        data=array(full(index=INTEGER, label=STRING, probs=array(NUMBER), num_classes=INTEGER)),
    ),
    "Scores": listed("score", score=NUMBER),
    "Ranking": full(
        **HEAD,
        results=array(full(index=INTEGER, document=full(text=STRING), relevance_score=NUMBER)),
    ),
    "Model": CARD,
    "Models": full(
        object=const("list"),
        data=array(ref("Model")),
        has_more=const(False),
        first_id=STRING,
        last_id=STRING,
    ),
    "Tokens": full(
        count=INTEGER, max_model_len=INTEGER, tokens=IDS, token_strs=field(array(STRING))
    ),
    "Text": full(prompt=STRING),
    "Health": full(status=STRING, running=INTEGER, waiting=INTEGER, last_step_age_s=NUMBER),
    "Ready": full(status=STRING),
    "Version": full(version=STRING),
    "Load": full(server_load=INTEGER),
    "KVEventSources": array(
        full(
            data_parallel_rank=INTEGER,
            endpoint=STRING,
            replay_endpoint=field(STRING),
            topic=STRING,
        )
    ),
    "Sleeping": full(is_sleeping=BOOL),
    "ServerInfo": full(
        version=STRING,
        model_path=STRING,
        served_model_name=STRING,
        served_model_names=array(STRING),
        **dict.fromkeys(SIZES, INTEGER),
        created=INTEGER,
        resolved=OBJECT,
    ),
}
