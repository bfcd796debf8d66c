"""The router's index beside Dynamo's: events applied, prefixes matched, memory, hashing."""
