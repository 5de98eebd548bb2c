"""The bundled pair: a small target and its draft."""
