//! LoRA adapters on the CPU in plain loops.

use crate::batch::StepBatch;
use crate::executor::reference_executor::{Matrix, dot, matvec};
use crate::model::lora::Adapter;
use std::sync::Arc;

/// Those that rows may have.
#[derive(Default)]
pub(super) struct Adapters(Vec<Arc<Adapter>>);

impl Adapters {
    pub(super) fn load(&mut self, adapter: &Arc<Adapter>) {
        if self.0.iter().all(|there| there.id != adapter.id) {
            self.0.push(adapter.clone());
        }
    }

    pub(super) fn unload(&mut self, adapter: u64) {
        self.0.retain(|there| there.id != adapter);
    }

    /// Refuses a batch with an adapter that is not there.
    pub(super) fn check(&self, batch: &StepBatch) -> Result<(), String> {
        let is_there = |id: &u64| *id == 0 || self.0.iter().any(|adapter| adapter.id == *id);
        match batch.adapter_of_row.iter().find(|id| !is_there(id)) {
            Some(id) => Err(format!("adapter {id:016x} is not loaded")),
            None => Ok(()),
        }
    }

    /// Of a token's row.
    pub(super) fn of_token(&self, batch: &StepBatch, t: usize) -> Option<&Adapter> {
        let id = batch.adapter(batch.row_of_token[t] as usize);
        self.0.iter().find(|adapter| adapter.id == id).map(|adapter| &**adapter)
    }
}

/// A product of one token, and what an adapter adds to it.
pub(super) fn adapted(w: &Matrix, x: &[f32], bias: Option<&Matrix>, adapter: Option<&Adapter>) -> Vec<f32> {
    let mut y = matvec(w, x, bias);
    if let Some(delta) = adapter.and_then(|adapter| adapter.delta(w.role)) {
        let inner: Vec<f32> = delta.a.chunks_exact(x.len()).map(|a| dot(a, x) as f32).collect();
        let rows = delta.b.chunks_exact(inner.len());
        y.iter_mut().zip(rows).for_each(|(y, b)| *y = (f64::from(*y) + dot(b, &inner)) as f32);
    }
    y
}
