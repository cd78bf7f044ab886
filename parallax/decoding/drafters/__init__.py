"""Drafters: where candidate tokens come from. One file each."""

from parallax.decoding.drafters.draft_model import DraftModel
from parallax.decoding.drafters.nothing import Nothing
from parallax.decoding.drafters.prompt_lookup import PromptLookup
from parallax.decoding.drafters.token_recycling import TokenRecycling

__all__ = ["DraftModel", "Nothing", "PromptLookup", "TokenRecycling"]
