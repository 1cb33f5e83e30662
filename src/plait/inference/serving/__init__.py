"""Requests that come at any time, decoded together by one process, behind an endpoint as OpenAI's on loopback."""
