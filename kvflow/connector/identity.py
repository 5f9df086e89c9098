"""What vLLM's own block hashes depend on, read off one of its requests. Imports no vLLM."""

from typing import Any

from kvflow.connector.fingerprint import Identity, Item


def identity_of(request: Any) -> Identity | None:
    """None for a prompt that token ids do not tell: one given, wholly or in part, as embeddings."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return None
    lora = request.lora_request
    return Identity(
        cache_salt=request.cache_salt,
        lora=(lora.lora_name, lora.lora_path) if lora else None,
        items=tuple(_item(feature) for feature in request.mm_features),
    )


def _item(feature: Any) -> Item:
    return Item(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
