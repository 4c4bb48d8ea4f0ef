//! A product with what must happen to its input first: inputs brought into the order of the matrix's columns.

use super::activation::{Activation, Forms};
use crate::gpu::{Gpu, GpuError, Recording};
use crate::kernels::gather::Gather;
use crate::kernels::matmul::Matmul;

/// A bound product.
pub struct Product {
    pub gather: Option<Gather>,
    pub matmul: Matmul,
}

impl Product {
    pub fn record(&self, recording: &mut Recording, m: u32) {
        if let Some(gather) = &self.gather {
            gather.record(recording, m);
        }
        self.matmul.record(recording, m);
    }
}

/// Buffers for reordered inputs, shared by all products of one size: each is read right after it was written.
#[derive(Default)]
pub struct Reordered {
    found: Vec<((u32, u32, Forms), Activation)>,
}

impl Reordered {
    pub fn get(&mut self, gpu: &Gpu, rows: u32, size: u32, forms: Forms) -> Result<Activation, GpuError> {
        if let Some((_, found)) = self.found.iter().find(|(key, _)| *key == (rows, size, forms)) {
            return Ok(found.clone());
        }
        let made = Activation::alloc(gpu, "reordered", rows, size, forms)?;
        self.found.push(((rows, size, forms), made.clone()));
        Ok(made)
    }
}
