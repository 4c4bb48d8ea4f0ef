//! Bytes needed for weights, KV pool and workspace: one pure function for loading, estimates and the app.
