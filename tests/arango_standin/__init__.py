"""A stand-in for an ArangoDB server: the part of its HTTP interface that our store uses.

It keeps the documented semantics, each module naming the pages it follows; below,
``DOCS`` is https://docs.arango.ai/arangodb/3.12/. Nothing here is durable or fast.
"""
