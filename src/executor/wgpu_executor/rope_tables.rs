//! Tables of cosines and sines on the GPU, made once at load.

use super::super::LoadError;
use super::forward::Builder;
use crate::gpu::{BufferSlice, BufferUse};
use crate::kernels::rope_kv_write::rope_table;
use crate::model::rope;
use crate::model::spec::{ModelSpec, RopeSpec};

/// Cosines and sines by position, for the kinds of layers that there are.
pub(super) struct RopeTables {
    all: Option<BufferSlice>,
    /// Layers with a window, where theirs differs.
    windowed: Option<BufferSlice>,
    /// Layers that do not rotate.
    none: Option<BufferSlice>,
}

impl RopeTables {
    pub(super) fn of(&self, spec: &ModelSpec, layer: u32) -> &BufferSlice {
        let table = match spec.rope_of(layer) {
            None => &self.none,
            Some(rope) if Some(rope) == spec.block.windowed_rope.as_ref() => &self.windowed,
            Some(_) => &self.all,
        };
        table.as_ref().expect("a table is made for each kind of layer")
    }
}

impl Builder<'_> {
    /// Tables for the kinds of layers that the model has.
    pub(super) fn rope_tables(&self) -> Result<RopeTables, LoadError> {
        let (spec, n) = (self.spec, self.cfg.max_model_len);
        let num_pairs = spec.rope.rotary_dim as usize / 2 * n as usize;
        let of = |rope: &RopeSpec| {
            let (cos, sin) = rope::cos_sin_table(rope, n);
            self.rope_table(&rope_table(&cos, &sin))
        };
        let all: Vec<Option<&RopeSpec>> = (0..spec.num_layers).map(|l| spec.rope_of(l)).collect();
        let windowed = spec.block.windowed_rope.as_ref();
        Ok(RopeTables {
            all: if all.contains(&Some(&spec.rope)) { Some(of(&spec.rope)?) } else { None },
            windowed: windowed.map(of).transpose()?,
            // Turning by nothing is exact.
            none: if all.contains(&None) { Some(self.rope_table(&vec![[1.0, 0.0]; num_pairs])?) } else { None },
        })
    }

    /// Cosines and sines of every position that a sequence can reach.
    fn rope_table(&self, pairs: &[[f32; 2]]) -> Result<BufferSlice, LoadError> {
        let buffer = self.gpu.alloc("rope table", pairs.len() as u64 * 8, BufferUse::Storage)?;
        let mut uploader = crate::gpu::Uploader::new(self.gpu);
        uploader.write(&buffer.whole(), bytemuck::cast_slice(pairs))?;
        uploader.flush()?;
        Ok(buffer.whole())
    }
}
