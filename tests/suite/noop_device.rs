//! Pipelines, bindings and encoders are legal: built on wgpu's backend that runs nothing, on any machine.

use kvasir::gpu::{BufferUse, Defines, Gpu, GpuBackend, GpuRequest, Recording, Replayer};

fn open() -> Gpu {
    let request = GpuRequest { backend: Some(GpuBackend::Noop), adapter: None, floor: true, checked_shaders: false };
    Gpu::open(&request).expect("the noop backend needs no driver")
}

#[test]
fn a_recording_encodes_and_submits_without_an_adapter() {
    let gpu = open();
    let kernel = gpu.kernel("fill", &Defines::new()).unwrap();
    let words = gpu.alloc("words", 256, BufferUse::Storage).unwrap();
    let params = gpu.alloc("params", 8, BufferUse::Uniform).unwrap();
    let bound = gpu.bind(&kernel, &[("words", &words.whole()), ("params", &params.whole())]).unwrap();
    let mut recording = Recording::new("step");
    recording.dispatch("fill", &bound, 1);
    let mut replayer = Replayer::new(&gpu);
    let ticket = replayer.submit(&gpu, &recording, &[words.whole()]).unwrap();
    let finished = replayer.wait(&gpu, ticket).unwrap();
    assert_eq!(finished.stats.passes, 1);
    assert_eq!(finished.readback[0].len(), 256);
}
