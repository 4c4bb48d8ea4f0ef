//! Pipelines, bindings and encoders are legal: built on wgpu's backend that runs nothing, on any machine.

use kvasir::gpu::{BufferUse, Defines, Gpu, GpuBackend, GpuRequest, Recording, Replayer, Uploader};
use kvasir::kernels::matmul::{Matmul, Output};
use kvasir::kernels::norm::{Kind, Norm, Target};
use kvasir::kernels::{
    Activations, Choices, Class, KernelContext, PackedMatrix, ParamArena, QuantisedRows, RowCount, RowOutput,
    upload_vector,
};
use kvasir::model::dtype::DType;

fn open() -> Gpu {
    let request = GpuRequest {
        backend: Some(GpuBackend::Noop),
        adapter: None,
        floor: true,
        checked_shaders: false,
        matrix_units: false,
    };
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

#[test]
fn a_norm_and_a_product_are_recorded_as_one_pass() {
    let gpu = open();
    let mut uploader = Uploader::new(&gpu);
    let weights =
        PackedMatrix::upload(&gpu, &mut uploader, "w", DType::Q4_0, 64, &[&[0; 36 * 100]]).expect("a hundred rows");
    let gain = upload_vector(&gpu, &mut uploader, "gain", &[1.0; 60], 64).unwrap();
    assert_eq!(gain.size(), 256);
    let alloc = |label, bytes| gpu.alloc(label, bytes, BufferUse::Storage).unwrap();
    let (x, y, step_meta) = (alloc("x", 8 * 256), alloc("y", 8 * 400), alloc("step_meta", 1024).whole());
    let rows = QuantisedRows { q: alloc("q", 8 * 64).whole(), scales: alloc("s", 8 * 16).whole() };
    let mut ctx = KernelContext {
        gpu: &gpu,
        class: Class::of(gpu.caps()),
        params: &mut ParamArena::new(),
        choices: &mut Choices::default(),
        step_meta: &step_meta,
        multiply_pairs: false,
        matrix_units: None,
    };
    assert_eq!(ctx.class, Class::Floor, "a floor request uses no subgroups");
    let out = RowOutput::I8(&rows);
    let (x, gain) = (x.whole(), gain.whole());
    let (kind, target) = (Kind::Rms { gain: &gain }, Target::Row(out));
    let norm = Norm::new(&mut ctx, "norm", &x, kind, target, (60, 1e-5), RowCount::Tokens).unwrap();
    let y_whole = y.whole();
    let output = Output { slice: &y_whole, stride: 100, offset: 0, accumulate: false };
    let x = Activations::I8(&rows);
    let product = Matmul::new(&mut ctx, "qkv", &weights, x, output, None, RowCount::Tokens).unwrap();
    let mut recording = Recording::new("layer");
    norm.record(&mut recording, 8);
    product.record(&mut recording, 8);
    let text = recording.to_string();
    assert!(text.contains("norm: 8 x norm[I8 NORMS RMS SG=64]") && text.contains("qkv: 2 x matmul_i8"), "{text}");
    let mut replayer = Replayer::new(&gpu);
    let ticket = replayer.submit(&gpu, &recording, &[]).unwrap();
    let stats = replayer.wait(&gpu, ticket).unwrap().stats;
    assert_eq!((stats.submits, stats.passes, stats.dispatches, stats.readback_bytes), (1, 1, 2, 0));
}

#[test]
fn every_floor_variant_becomes_a_pipeline() {
    let gpu = open();
    let floor: Vec<_> =
        kvasir::kernels::variants::all().into_iter().filter(|(_, defines)| defines.get("SUBGROUP").is_none()).collect();
    for (name, defines) in &floor {
        gpu.kernel(name, defines).unwrap_or_else(|e| panic!("{name} [{defines}]: {e}"));
    }
    let mut heard = Vec::new();
    let is_done = gpu.finish_compiling(&mut |made, all| {
        heard.push((made, all));
        true
    });
    assert_eq!(is_done, Ok(true));
    assert!(heard.windows(2).all(|pair| pair[0].0 <= pair[1].0), "{heard:?}");
    assert!(heard.last().is_some_and(|(made, all)| made == all), "progress reaches the end: {heard:?}");
    assert_eq!(gpu.check(), Ok(()));
}

/// Three dispatches of a kernel that fills words.
fn three_fills(gpu: &Gpu) -> (Recording, kvasir::gpu::BufferSlice) {
    let kernel = gpu.kernel("fill", &Defines::new()).unwrap();
    let words = gpu.alloc("words", 256, BufferUse::Storage).unwrap();
    let params = gpu.alloc("params", 8, BufferUse::Uniform).unwrap();
    let bound = gpu.bind(&kernel, &[("words", &words.whole()), ("params", &params.whole())]).unwrap();
    let mut recording = Recording::new("step");
    (0..3).for_each(|_| recording.dispatch("fill", &bound, 1));
    (recording, words.whole())
}

#[test]
fn what_is_submitted_again_and_again_is_encoded_before_it_is_asked_for() {
    let gpu = open();
    let (recording, words) = three_fills(&gpu);
    let (other, _) = three_fills(&gpu);
    let mut replayer = Replayer::new(&gpu);
    let mut step = |recording: &Recording, size: u64| {
        let slice = kvasir::gpu::BufferSlice { size, ..words.clone() };
        let ticket = replayer.submit(&gpu, recording, &[slice]).unwrap();
        replayer.prepare(&gpu);
        let finished = replayer.wait(&gpu, ticket).unwrap();
        assert_eq!((finished.stats.dispatches, finished.readback[0].len() as u64), (3, size));
        replayer.num_prepared()
    };
    let prepared: Vec<u64> = (0..5).map(|_| step(&recording, 256)).collect();
    assert_eq!(prepared, [0, 0, 1, 2, 3], "two alike make a third one expected");
    // Something else is encoded when it comes, and so is the return.
    assert_eq!([step(&other, 256), step(&recording, 256), step(&recording, 128), step(&recording, 128)], [3; 4]);
    assert_eq!(step(&recording, 128), 4);
    replayer.set_preparing(false);
    for _ in 0..3 {
        let ticket = replayer.submit(&gpu, &recording, std::slice::from_ref(&words)).unwrap();
        replayer.prepare(&gpu);
        let _ = replayer.wait(&gpu, ticket).unwrap();
    }
    assert_eq!(replayer.num_prepared(), 4);
}

#[test]
fn a_recording_is_submitted_in_parts() {
    let gpu = open();
    let (recording, words) = three_fills(&gpu);
    let mut replayer = Replayer::new(&gpu);
    for (ends, submits) in [(&[][..], 1), (&[3], 1), (&[1, 3], 2), (&[1, 2, 3], 3)] {
        let ticket = replayer.submit_in(&gpu, &recording, std::slice::from_ref(&words), ends).unwrap();
        let finished = replayer.wait(&gpu, ticket).unwrap();
        let stats = finished.stats;
        assert_eq!((stats.submits, stats.passes, stats.dispatches), (submits, submits, 3), "{ends:?}");
        assert_eq!((finished.readback[0].len(), replayer.ran_partly()), (256, false));
    }
}
