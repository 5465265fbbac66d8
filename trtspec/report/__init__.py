"""What pages of reports share: one look, one way to draw. Knows HTML and SVG; does not know what a report is about."""
