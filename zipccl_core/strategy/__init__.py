"""Which way a call goes."""
