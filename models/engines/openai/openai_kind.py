"""The kind of a model behind an OpenAI-compatible endpoint."""

import os
from dataclasses import dataclass, replace

from grmpipe.models.engines.endpoint_use import EndpointUse
from grmpipe.models.engines.engine_kind import Endpoint, EngineKind, OptionKey
from grmpipe.models.engines.network import find_network_path
from grmpipe.models.settings import CONTINUES, EngineConfig, ModelConfig, OpenAIConfig
from grmpipe.models.types import ChatEngine, RemoteScorer, RemoteTeacher


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIEndpoint(Endpoint):
    options: OpenAIConfig

    def connect(self, role: str, model: ModelConfig, use: EndpointUse) -> ChatEngine:
        """Make the client, with the variables of the chat template in each request."""
        from grmpipe.models.engines.openai.openai_engine import OpenAIEngine

        return OpenAIEngine(model.path, role, request_options(self.options, model), use=use)

    def connect_scorer(self, model: ModelConfig, use: EndpointUse) -> RemoteScorer:
        from grmpipe.models.engines.openai.openai_engine import PoolingScorer

        return PoolingScorer(model.path, self.options, use=use)

    def connect_teacher(self, role: str, model: ModelConfig, use: EndpointUse) -> RemoteTeacher:
        from grmpipe.models.engines.openai.openai_engine import PromptScorer

        return PromptScorer(model.path, role, self.options, use=use)

    def scorer_tokenizer(self, model: ModelConfig) -> str:
        return self.options.tokenizer or model.path


class OpenAIKind(EngineKind[OpenAIConfig]):
    section = "openai"
    outside = True
    scores = True
    top_logprobs = True

    @classmethod
    def read_options(cls, sections: EngineConfig) -> OpenAIConfig:
        return sections.openai

    @property
    def endpoint(self) -> Endpoint:
        return OpenAIEndpoint(
            url=self.options.base_url,
            requests_per_minute=self.options.requests_per_minute,
            tokens_per_minute=self.options.tokens_per_minute,
            chat_markup=tuple(self.options.chat_markup),
            continues=bool(self.options.extra_body.get(CONTINUES[0])),
            options=self.options,
        )

    def check_installed(self, role: str, model: ModelConfig, key: OptionKey) -> None:
        options = self.options
        if "chat_template_kwargs" in options.extra_body and model.chat_template_kwargs:
            raise ValueError(
                f"{key('extra_body')}: chat_template_kwargs are also set in {role}.chat_template_kwargs; keep "
                "those alone"
            )
        try:
            find_network_path(options.base_url)
        except ValueError as error:
            raise ValueError(f"{key('base_url')}: {error}") from None
        if options.api_key_env and not os.environ.get(options.api_key_env, "").strip():
            name = key("api_key_env")
            raise ValueError(
                f"{name}: the environment variable {options.api_key_env} is not set; set it, type "
                f"{name}=<another variable>, or {name}='' for an endpoint that wants no key"
            )


def request_options(options: OpenAIConfig, model: ModelConfig) -> OpenAIConfig:
    """The options with the model's `chat_template_kwargs` among the fields of each request."""
    if not model.chat_template_kwargs:
        return options
    return replace(options, extra_body={**options.extra_body, "chat_template_kwargs": model.chat_template_kwargs})
