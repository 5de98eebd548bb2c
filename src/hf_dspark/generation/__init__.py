"""Decoding with a draft: drafting, verification, acceptance, the loop over rounds."""
