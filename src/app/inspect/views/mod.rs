//! The pictures of Inspect. Each reads the model and emits commands; none changes the model.

pub mod block_look;
pub mod block_map;
pub mod block_tables;
pub mod detail;
pub mod dock;
pub mod forks;
pub mod host_strip;
pub mod kernels;
pub mod keys;
pub mod kpi_strip;
pub mod lanes;
pub mod legend;
pub mod paint;
pub mod panel;
pub mod prefixes;
pub mod queue;
pub mod request_table;
pub mod timeline;
pub mod workspace;
