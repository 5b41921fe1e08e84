"""Trained policies: loaded, played, evaluated, compared, recorded, filmed."""
