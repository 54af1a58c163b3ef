"""Proof of what a run has computed: any step of it again, and certificates."""
