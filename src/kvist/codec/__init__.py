"""The bytes of one block on a medium: the frame, and the codecs that make it smaller or sealed."""
