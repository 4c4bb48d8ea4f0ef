//! Kernels: stitched, reflected, compiled once per set of defines, beside the caller; and kernels with their buffers bound.
//!
//! All bindings of a kernel are in group 0. Shader modules are trusted (no bounds, loop or division checks) unless the
//! device was opened with `checked_shaders`; workgroup memory is not zeroed, so kernels write before they read.

use std::sync::Arc;

use super::buffer::BufferSlice;
use super::compiler::Pending;
use super::device::Gpu;
use super::error::GpuError;
use super::shader::{Defines, ShaderError, Stitched, stitch};

/// How a kernel uses a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindingKind {
    Uniform,
    ReadOnly,
    /// A read-only storage texture.
    Texels(wgpu::TextureFormat),
    /// A line of texels that is only written.
    WrittenTexels(wgpu::TextureFormat),
    ReadWrite,
}

/// A binding as the shader declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindingInfo {
    pub name: String,
    pub index: u32,
    pub kind: BindingKind,
    /// Bytes of the declared type; of one element for a runtime-sized array.
    pub min_bytes: u64,
}

/// What naga sees of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reflection {
    pub bindings: Vec<BindingInfo>, // by index
    pub workgroup_size: [u32; 3],
    /// Bytes of `var<workgroup>` declarations.
    pub workgroup_bytes: u64,
}

/// A kernel that is compiled, or about to be.
#[derive(Debug)]
pub struct Kernel {
    pub name: String,
    pub defines: Defines,
    pub reflection: Reflection,
    pipeline: Pending,
    layout: wgpu::BindGroupLayout,
}

/// A kernel with its buffers: what a dispatch needs besides a grid. Made at load, reused every step.
pub struct Bound {
    pub kernel: Arc<Kernel>,
    pub slices: Vec<BufferSlice>, // in order of the kernel's bindings
    pub(super) group: wgpu::BindGroup,
}

impl std::fmt::Debug for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[{}](", self.kernel.name, self.kernel.defines)?;
        for (i, (info, slice)) in self.kernel.reflection.bindings.iter().zip(&self.slices).enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{}: {}@{}+{}", info.name, slice.buffer.label(), slice.offset, slice.size)?;
        }
        f.write_str(")")
    }
}

/// Bindings, workgroup size and workgroup memory of a parsed kernel.
pub fn reflect(stitched: &Stitched, module: &naga::Module) -> Result<Reflection, ShaderError> {
    let fault = |message: String| stitched.error_at(1, message);
    let [entry] = module.entry_points.as_slice() else {
        return Err(fault(format!("expected one entry point, found {}", module.entry_points.len())));
    };
    let mut layouter = naga::proc::Layouter::default();
    layouter.update(module.to_ctx()).map_err(|e| fault(e.to_string()))?;
    let mut bindings = Vec::new();
    let mut workgroup_bytes = 0;
    for (_, global) in module.global_variables.iter() {
        let min_bytes = u64::from(layouter[global.ty].size);
        if global.space == naga::AddressSpace::WorkGroup {
            workgroup_bytes += min_bytes;
        }
        let Some(binding) = &global.binding else { continue };
        let name = global.name.clone().unwrap_or_default();
        let kind = match global.space {
            naga::AddressSpace::Uniform => BindingKind::Uniform,
            naga::AddressSpace::Storage { access } if access.contains(naga::StorageAccess::STORE) => {
                BindingKind::ReadWrite
            }
            naga::AddressSpace::Storage { .. } => BindingKind::ReadOnly,
            naga::AddressSpace::Handle => texel_kind(&module.types[global.ty].inner).ok_or_else(|| {
                fault(format!("binding `{name}` is no texture of unsigned texels that is only read or only written"))
            })?,
            other => return Err(fault(format!("binding `{name}` lies in {other:?}"))),
        };
        if binding.group != 0 {
            return Err(fault(format!("binding `{name}` is not in group 0")));
        }
        bindings.push(BindingInfo { name, index: binding.binding, kind, min_bytes });
    }
    bindings.sort_by_key(|b| b.index);
    Ok(Reflection { bindings, workgroup_size: entry.workgroup_size, workgroup_bytes })
}

/// Storage textures of unsigned words, read or written.
fn texel_kind(ty: &naga::TypeInner) -> Option<BindingKind> {
    let naga::TypeInner::Image { dim: naga::ImageDimension::D2, arrayed: false, class } = ty else { return None };
    let naga::ImageClass::Storage { format, access } = class else { return None };
    let format = match format {
        naga::StorageFormat::R32Uint => wgpu::TextureFormat::R32Uint,
        naga::StorageFormat::Rg32Uint => wgpu::TextureFormat::Rg32Uint,
        naga::StorageFormat::Rgba32Uint => wgpu::TextureFormat::Rgba32Uint,
        _ => return None,
    };
    match *access {
        naga::StorageAccess::LOAD => Some(BindingKind::Texels(format)),
        naga::StorageAccess::STORE => Some(BindingKind::WrittenTexels(format)),
        _ => None,
    }
}

impl Kernel {
    pub(super) fn made(&self) -> Option<&wgpu::ComputePipeline> {
        self.pipeline.made()
    }
}

impl Gpu {
    /// The kernel of this file and these defines, compiled from the first call on.
    pub fn kernel(&self, name: &str, defines: &Defines) -> Result<Arc<Kernel>, GpuError> {
        let key = (name.to_string(), defines.clone());
        if let Some(kernel) = self.kernels.lock().expect("no panic while locked").get(&key) {
            return Ok(kernel.clone());
        }
        let kernel = Arc::new(self.start(stitch(name, defines)?, defines)?);
        let mut kernels = self.kernels.lock().expect("no panic while locked");
        Ok(kernels.entry(key).or_insert(kernel).clone())
    }

    /// Makes the pipelines of all kernels that were asked for, on all cores. `progress` hears how many of how many are made
    /// and may end it by returning false; the answer is then false.
    pub fn finish_compiling(&self, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<bool, GpuError> {
        if !self.compiler.finish(progress) {
            return Ok(false);
        }
        let kernels: Vec<Arc<Kernel>> = self.kernels.lock().expect("no panic while locked").values().cloned().collect();
        kernels.iter().try_for_each(|kernel| self.pipeline(kernel).map(drop))?;
        Ok(true)
    }

    /// The kernel's pipeline, once it is made.
    pub(super) fn pipeline<'k>(&self, kernel: &'k Kernel) -> Result<&'k wgpu::ComputePipeline, GpuError> {
        self.compiler.wait(&kernel.pipeline)
    }

    /// Compiles a stitched text that is not in the cache.
    pub fn compile(&self, stitched: &Stitched, defines: &Defines) -> Result<Kernel, GpuError> {
        let kernel = self.start(stitched.clone(), defines)?;
        self.pipeline(&kernel)?;
        Ok(kernel)
    }

    /// A kernel whose pipeline is on its way. Faults of the text show here, those of the driver where it is used.
    fn start(&self, stitched: Stitched, defines: &Defines) -> Result<Kernel, GpuError> {
        let what = format!("kernel {} [{defines}]", stitched.name);
        if let Some(dir) = self.dump_dir() {
            let file = dir.join(format!("{} {defines}.wgsl", stitched.name).replace(' ', "-").replace('=', ""));
            std::fs::write(&file, &stitched.text)
                .map_err(|e| GpuError::validation(&what, format!("cannot write {}: {e}", file.display())))?;
        }
        let reflection = reflect(&stitched, &stitched.parse()?)?;
        let entries: Vec<wgpu::BindGroupLayoutEntry> = reflection.bindings.iter().map(layout_entry).collect();
        let desc = wgpu::BindGroupLayoutDescriptor { label: Some(&what), entries: &entries };
        let layout = self.scoped(&what, 0, || self.device.create_bind_group_layout(&desc))?;
        let name = stitched.name.clone();
        let pipeline = self.compiler.start(self.maker(), what, stitched, layout.clone());
        Ok(Kernel { name, defines: defines.clone(), reflection, pipeline, layout })
    }

    /// Binds slices by the names that the kernel declares; all of them, each once.
    pub fn bind(&self, kernel: &Arc<Kernel>, bindings: &[(&str, &BufferSlice)]) -> Result<Arc<Bound>, GpuError> {
        let what = || format!("bindings of kernel {} [{}]", kernel.name, kernel.defines);
        let infos = &kernel.reflection.bindings;
        if let Some((name, _)) = bindings.iter().find(|(name, _)| !infos.iter().any(|i| i.name == *name)) {
            return Err(GpuError::validation(what(), format!("the kernel has no binding `{name}`")));
        }
        let mut slices = Vec::with_capacity(infos.len());
        for info in infos {
            let mut given = bindings.iter().filter(|(name, _)| *name == info.name);
            let (Some((_, slice)), None) = (given.next(), given.next()) else {
                return Err(GpuError::validation(what(), format!("binding `{}` must be given once", info.name)));
            };
            if !info.kind.fits(slice) {
                let message = format!("binding `{}` is {:?}, which {slice:?} is not", info.name, info.kind);
                return Err(GpuError::validation(what(), message));
            }
            let limit = self.caps.max_binding_bytes;
            if matches!(info.kind, BindingKind::ReadOnly | BindingKind::ReadWrite) && slice.size > limit {
                let (what, bytes) = (slice.buffer.label().into(), slice.size);
                return Err(GpuError::BindingTooLarge { what, bytes, limit });
            }
            slices.push((*slice).clone());
        }
        let entries: Vec<wgpu::BindGroupEntry<'_>> = infos
            .iter()
            .zip(&slices)
            .map(|(info, slice)| wgpu::BindGroupEntry { binding: info.index, resource: resource(slice) })
            .collect();
        let desc = wgpu::BindGroupDescriptor { label: Some(&kernel.name), layout: &kernel.layout, entries: &entries };
        let group = self.scoped(&what(), 0, || self.device.create_bind_group(&desc))?;
        Ok(Arc::new(Bound { kernel: kernel.clone(), slices, group }))
    }
}

impl BindingKind {
    /// Texels are bound as texels, all else as buffers.
    fn fits(self, slice: &BufferSlice) -> bool {
        match self {
            BindingKind::Texels(format) => slice.buffer.texels().is_some_and(|t| t.is_read_as(format)),
            BindingKind::WrittenTexels(format) => {
                slice.buffer.texels().is_some_and(|t| t.is_line && t.is_read_as(format))
            }
            _ => slice.buffer.texels().is_none(),
        }
    }
}

fn resource(slice: &BufferSlice) -> wgpu::BindingResource<'_> {
    match slice.buffer.texels() {
        Some(texels) => wgpu::BindingResource::TextureView(&texels.view),
        None => wgpu::BindingResource::Buffer(wgpu::BufferBinding {
            buffer: slice.buffer.raw(),
            offset: slice.offset,
            size: std::num::NonZeroU64::new(slice.size),
        }),
    }
}

fn layout_entry(info: &BindingInfo) -> wgpu::BindGroupLayoutEntry {
    let buffer = |ty| wgpu::BindingType::Buffer {
        ty,
        has_dynamic_offset: false,
        min_binding_size: std::num::NonZeroU64::new(info.min_bytes),
    };
    let texels = |access, format| wgpu::BindingType::StorageTexture {
        access,
        format,
        view_dimension: wgpu::TextureViewDimension::D2,
    };
    let ty = match info.kind {
        BindingKind::Uniform => buffer(wgpu::BufferBindingType::Uniform),
        BindingKind::ReadOnly => buffer(wgpu::BufferBindingType::Storage { read_only: true }),
        BindingKind::ReadWrite => buffer(wgpu::BufferBindingType::Storage { read_only: false }),
        BindingKind::Texels(format) => texels(wgpu::StorageTextureAccess::ReadOnly, format),
        BindingKind::WrittenTexels(format) => texels(wgpu::StorageTextureAccess::WriteOnly, format),
    };
    wgpu::BindGroupLayoutEntry { binding: info.index, visibility: wgpu::ShaderStages::COMPUTE, ty, count: None }
}
