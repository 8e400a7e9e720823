"""What looks after a long run while it goes on: the ``health`` section. All of it is off by default."""
