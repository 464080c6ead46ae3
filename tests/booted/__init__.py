"""Tests on a whole booted system: what a private manager cannot show."""
