"""Adapters, one file per framework; each imports its framework, and nothing else imports it.

A framework that calls F.scaled_dot_product_attention, as diffusers does, needs none:
attn_ext.activate() and attn_ext.use() reach it.
"""
