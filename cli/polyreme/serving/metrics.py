"""Metrics of a server of answers, in Prometheus' form."""

from __future__ import annotations

from polyreme_cluster.metric_registry import MetricRegistry

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PER_SECOND = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)


class ServeMetrics(MetricRegistry):
    """Metrics of ``polyreme serve``."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self.counter("serve_requests", "Requests for answers, by the code of their response.", "code")
        self.waiting = self.gauge("serve_waiting", "Requests without a first token.")
        self.running = self.gauge("serve_running", "Requests with a first token that have not ended.")
        self.prompt_tokens = self.counter("serve_prompt_tokens", "Tokens of prompts whose answer has begun.")
        self.answer_tokens = self.counter("serve_answer_tokens", "Tokens of answers.")
        self.first_token_s = self.histogram(
            "serve_first_token_seconds",
            "Time from a request to the first token of its answer.",
            FIRST_TOKEN_S,
        )
        self.tokens_per_s = self.histogram(
            "serve_answer_tokens_per_second", "Tokens a second of an answer, after its first one.", PER_SECOND
        )
        self.pages = self.gauge("serve_cache_pages", "Pages of the cache.")
        self.pages_used = self.gauge("serve_cache_pages_used", "Pages of the cache that answers hold.")
