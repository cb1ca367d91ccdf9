"""The built-in delegates: ingest, chunking, scoring, buffers, seals, summaries, embeddings. No network."""
