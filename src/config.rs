//! Settings from flags, environment and file, resolved once; all limits live here.
