"""Drafts on the Hub: model cards and uploading."""

from hf_dspark.hub.card import DraftCard, write_draft_card
from hf_dspark.modeling.uploading import upload_draft

__all__ = ["DraftCard", "upload_draft", "write_draft_card"]
