"""Which tokens come when: windows, packed documents, mixtures and streams, each a pure function of (seed, number)."""
