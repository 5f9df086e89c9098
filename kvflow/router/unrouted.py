"""What is not there: said in vLLM's words, and honestly where vLLM itself would have it."""

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvflow.errors import RequestError
from kvflow.router.shapes import OPENAI, UnreadableError

ROUTED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/models",
)

UNROUTED = frozenset(
    """
    /abort_requests /classify /cohere/v2/chat /cohere/v2/chat/render /collective_rpc /fault_tolerance/apply
    /fault_tolerance/status /finish_weight_update /generative_scoring /get_world_size /inference/v1/abort_requests
    /inference/v1/generate /init_weight_transfer_engine /invocations /is_paused /is_scaling_elastic_ep /is_sleeping
    /kv_event_sources /load /pause /ping /pooling /release_kv_cache_memory /rerank /reset_encoder_cache /reset_mm_cache
    /reset_prefix_cache /resume /scale_elastic_ep /score /server_info /shutdown_weight_transfer_engine /sleep
    /start_draft_weight_update /start_profile /start_weight_update /stop_profile /tokenizer_info
    /update_weight_version /update_weights /v1/audio/transcriptions /v1/audio/translations
    /v1/chat/completions/batch /v1/chat/completions/derender /v1/chat/completions/render /v1/completions/derender
    /v1/completions/render /v1/embeddings /v1/load_lora_adapter /v1/messages/render /v1/realtime /v1/rerank
    /v1/responses/render /v1/score /v1/systemone /v1/unload_lora_adapter /v2/embed /v2/rerank /wake_up /weight_checker
    /weight_info
    """.split()  # noqa: SIM905 - a list literal would have a line for each
)
"""Of the routers under `vllm/entrypoints` in 0.32, whatever model and flags they need."""


async def not_routed(request: Request, e: Exception) -> Response:
    """vLLM's web framework answers what it knows no route for, before vLLM's own words."""
    assert isinstance(e, HTTPException)
    status = HTTPStatus(e.status_code)
    error: RequestError = UnreadableError(str(e.detail))
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED) and request.url.path in UNROUTED:
        status = HTTPStatus.NOT_FOUND
        message = f"vLLM has {request.url.path}, but kvflow does not route it. It routes {', '.join(ROUTED)}."
        error = RequestError(message, status=status, kind=status.phrase)
    return Response(OPENAI.body(error), status, e.headers, media_type="application/json")
