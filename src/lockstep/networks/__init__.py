"""Networks as both engines build them: shapes, options and first parameters."""
