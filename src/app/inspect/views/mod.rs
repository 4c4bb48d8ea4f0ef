//! The pictures of Inspect. Each reads the model and emits commands; none changes the model.

pub mod block_look;
pub mod block_map;
pub mod block_tables;
pub mod detail;
pub mod dock;
pub mod kpi_strip;
pub mod lanes;
pub mod legend;
pub mod paint;
pub mod request_table;
pub mod timeline;
pub mod workspace;
