"""What a person can do to an installation, without click, so that a page can use it, too."""
