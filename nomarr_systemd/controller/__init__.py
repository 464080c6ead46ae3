"""The controller and the reconciler: root in a sandbox, running only while there is work."""
