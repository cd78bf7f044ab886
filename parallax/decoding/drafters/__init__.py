"""Drafters: where candidate tokens come from. One file each."""

from parallax.decoding.drafters.adaptive_ngram import AdaptiveNgram
from parallax.decoding.drafters.combined import Combined
from parallax.decoding.drafters.double import Double
from parallax.decoding.drafters.draft_model import DraftModel
from parallax.decoding.drafters.early_exit import EarlyExit
from parallax.decoding.drafters.graft import Graft
from parallax.decoding.drafters.input_guided import InputGuided
from parallax.decoding.drafters.mask_fill import MaskFill
from parallax.decoding.drafters.ngram_pool import NgramPool
from parallax.decoding.drafters.nothing import Nothing
from parallax.decoding.drafters.prompt_lookup import PromptLookup
from parallax.decoding.drafters.staged import Staged
from parallax.decoding.drafters.suffix_match import SuffixMatch
from parallax.decoding.drafters.token_recycling import TokenRecycling
from parallax.decoding.drafters.trigram import Trigram

__all__ = ["AdaptiveNgram", "Combined", "Double", "DraftModel", "EarlyExit", "Graft", "InputGuided", "MaskFill",
           "NgramPool", "Nothing", "PromptLookup", "Staged", "SuffixMatch", "TokenRecycling", "Trigram"]
