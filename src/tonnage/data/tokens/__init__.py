"""Marked -> Document: tokens with weights, borders proven, and the files that keep them."""
