"""Who carries the rows: threads (`sim`) or processes (`dist`), behind one contract (`base`)."""
