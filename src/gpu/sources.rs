//! The WGSL files, embedded. A test compares this table with the folder.

/// A file under `shaders/`.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// File name without folder and extension.
    pub name: &'static str,
    pub text: &'static str,
}

macro_rules! sources {
    ($folder:literal: $($name:literal)*) => {
        &[$(Source { name: $name, text: include_str!(concat!("../../shaders/", $folder, "/", $name, ".wgsl")) }),*]
    };
}

/// Functions and structs for `#import`.
pub const SHARED: &[Source] = sources!("shared":
    "activation"
    "attention_partial"
    "attention_store"
    "attention_tile"
    "dot8"
    "expert_tile"
    "grid"
    "kv_texels"
    "matmul_params"
    "pairs"
    "philox"
    "quantise"
    "quantise_lanes"
    "softmax"
    "step"
    "store_gated"
    "store_hidden"
    "sum_of_lanes"
    "units"
    "units_multiply"
    "units_store"
    "weight_planes"
    "weights"
);

/// One entry point each.
pub const KERNELS: &[Source] = sources!("kernels":
    "attention"
    "canary"
    "combine"
    "copy_blocks"
    "embed"
    "expert_pairs"
    "feed"
    "fill"
    "gather"
    "heads_norm"
    "latent_write"
    "logit_cap"
    "logprobs"
    "lora_expand"
    "lora_shrink"
    "mask"
    "matmul_f32"
    "matmul_i8"
    "matmul_units"
    "mlp"
    "norm"
    "peak"
    "penalties"
    "quantise"
    "rope_kv_write"
    "route"
    "sample"
    "subgroup_probe"
    "units_probe"
);

/// The kernel file of this name.
pub fn kernel(name: &str) -> Option<Source> {
    KERNELS.iter().copied().find(|s| s.name == name)
}

/// The shared file of this name.
pub fn shared(name: &str) -> Option<Source> {
    SHARED.iter().copied().find(|s| s.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_in_the_shader_folders_is_embedded() {
        for (folder, table) in [("shared", SHARED), ("kernels", KERNELS)] {
            let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("shaders").join(folder);
            let mut files: Vec<String> = std::fs::read_dir(&dir)
                .expect("the shader folder exists")
                .map(|e| e.expect("readable entry").file_name().to_string_lossy().into_owned())
                .collect();
            files.sort();
            let table: Vec<String> = table.iter().map(|s| format!("{}.wgsl", s.name)).collect();
            assert!(table.is_sorted(), "{folder}: keep the table sorted");
            assert_eq!(files, table, "{folder}");
        }
    }
}
