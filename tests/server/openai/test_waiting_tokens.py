"""The bound of prompt tokens that wait."""

from __future__ import annotations

from tests.server.harness import Running


def test_prompts_beyond_the_tokens_that_may_wait_are_refused_until_others_have_begun(
    fresh: Running,
) -> None:
    client = fresh.server_state.client
    client.max_queued_tokens = 10
    short = {"model": "fake", "prompt": "abcd", "max_tokens": 1}
    long = short | {"prompt": "a" * 20}
    assert fresh.post("/v1/completions", long).status == 200, "an idle server takes any"
    fresh.control.go.clear()
    with fresh.begin("/v1/completions", short) as first, fresh.begin("/v1/completions", short):
        while client.waiting_tokens < 8:
            assert fresh.get("/version").status == 200
        refused = fresh.post("/v1/completions", short)
        assert (refused.status, refused.error["code"]) == (503, "queue_full")
        assert "8 of 10 tokens of prompts wait" in refused.error["message"]
        fresh.control.go.set()
        assert first.status() == 200
    assert fresh.post("/v1/completions", short).status == 200
    assert client.waiting_tokens == 0
