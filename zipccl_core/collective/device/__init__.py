"""Collectives on a device: streams and events (`layer`), bytes (`mover`), who sends what to whom (`exchange`,
`patterns`), and the order of it all (`path`)."""
