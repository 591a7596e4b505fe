"""Coding agents against a server: programs that are run headless over bundled tasks, and recorded conversations."""
