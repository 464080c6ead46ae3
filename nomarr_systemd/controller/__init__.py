"""The controller and its second look, the reconciler: root, sandboxed, and briefly alive."""
