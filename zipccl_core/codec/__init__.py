"""What a tensor becomes on the wire."""
