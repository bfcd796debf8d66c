"""Published conformance suites, one for each Protocol: subclass one to prove an implementation."""
