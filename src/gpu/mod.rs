//! wgpu without language models: devices, shaders, pipelines, buffers, recordings.
