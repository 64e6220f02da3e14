"""Heads that draft from the hidden states of the model that verifies their drafts: EAGLE-3 and MTP layers."""
