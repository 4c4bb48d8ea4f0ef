//! The GPU layer itself, with its smallest kernel.

use bytemuck::{Pod, Zeroable};
use kvasir::gpu::{BufferUse, Defines, Gpu, GpuError, GpuRequest, Recording, Replayer, Stitched, Uploader};

use super::harness::rigs;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct FillParams {
    count: u32,
    value: u32,
}

#[test]
fn fill_writes_its_words_and_no_others() {
    for rig in rigs() {
        let kernel = rig.kernel("fill", &Defines::new());
        for count in [1, 63, 64, 65, 1000] {
            let words = rig.upload("words", &[7u32; 1024]);
            let params = rig.params(&FillParams { count, value: 9 });
            rig.run(&kernel, &[("words", &words.whole()), ("params", &params)], count.div_ceil(64));
            let got: Vec<u32> = rig.read(&words);
            assert!(got[..count as usize].iter().all(|w| *w == 9), "{} {count}", rig.name);
            assert!(got[count as usize..].iter().all(|w| *w == 7), "{} {count}", rig.name);
        }
    }
}

#[test]
fn dispatches_beyond_one_row_of_workgroups_reach_the_end() {
    let Some(rig) = rigs().first() else { return };
    let kernel = rig.kernel("fill", &Defines::new());
    let count = 70_000 * 64 - 5;
    let words = rig.upload("words", &vec![0u32; 70_000 * 64]);
    let params = rig.params(&FillParams { count, value: 1 });
    rig.run(&kernel, &[("words", &words.whole()), ("params", &params)], 70_000);
    let got: Vec<u32> = rig.read(&words);
    assert_eq!(got.iter().sum::<u32>(), count);
}

#[test]
fn a_submit_counts_its_work_and_returns_what_was_asked_for() {
    for rig in rigs() {
        let kernel = rig.kernel("fill", &Defines::new());
        let words = rig.upload("words", &[0u32; 64]);
        let copy = rig.upload("copy", &[0u32; 64]);
        let params = rig.params(&FillParams { count: 64, value: 3 });
        let bound = rig.gpu.bind(&kernel, &[("words", &words.whole()), ("params", &params)]).unwrap();
        let mut recording = Recording::new("step");
        recording.dispatch("fill", &bound, 1);
        recording.dispatch("fill again", &bound, 1);
        recording.dispatch("nothing", &bound, 0);
        recording.copy(words.slice(0, 128), copy.slice(128, 128));
        recording.clear_slice(words.slice(0, 4));
        recording.dispatch("fill after the copy", &bound, 1);
        assert!(recording.to_string().contains("fill again: 1 x fill[](words: words@0+256, params: params@0+8)"));
        let mut replayer = Replayer::new(&rig.gpu);
        for _ in 0..5 {
            let first = replayer.submit(&rig.gpu, &recording, &[copy.whole(), words.slice(4, 8)]).unwrap();
            let second = replayer.submit(&rig.gpu, &recording, &[words.slice(0, 4)]).unwrap();
            let second = replayer.wait(&rig.gpu, second).unwrap();
            let first = replayer.wait(&rig.gpu, first).unwrap();
            assert_eq!((first.stats.submits, first.stats.passes, first.stats.dispatches), (1, 2, 3));
            assert_eq!((first.stats.readback_bytes, first.readback.len()), (264, 2));
            let copied: &[u32] = bytemuck::cast_slice(&first.readback[0]);
            assert!(copied[..32].iter().all(|w| *w == 0) && copied[32..].iter().all(|w| *w == 3), "{}", rig.name);
            assert_eq!(first.gpu_us.is_some(), rig.gpu.caps().has_timestamps);
            assert_eq!(second.readback, [vec![3, 0, 0, 0]]);
        }
    }
}

#[test]
fn each_dispatch_is_timed_where_that_was_asked_for() {
    for rig in rigs() {
        let kernel = rig.kernel("fill", &Defines::new());
        let words = rig.upload("words", &[0u32; 64]);
        let params = rig.params(&FillParams { count: 64, value: 3 });
        let bound = rig.gpu.bind(&kernel, &[("words", &words.whole()), ("params", &params)]).unwrap();
        let mut recording = Recording::new("step");
        for layer in 0..3 {
            recording.dispatch(format!("layer {layer} fill"), &bound, 1);
        }
        let mut replayer = Replayer::new(&rig.gpu);
        assert_eq!(replayer.set_profiling(true), rig.gpu.caps().has_timestamps, "{}", rig.name);
        let submitted = replayer.submit(&rig.gpu, &recording, &[words.whole()]).unwrap();
        let timed = replayer.wait(&rig.gpu, submitted).unwrap();
        let names: Vec<String> =
            timed.dispatches.iter().map(|(kernel, label, _)| format!("{kernel} {label}")).collect();
        assert!(timed.readback[0].chunks_exact(4).all(|word| word == [3, 0, 0, 0]));
        if rig.gpu.caps().has_timestamps {
            assert_eq!(names, ["fill layer 0 fill", "fill layer 1 fill", "fill layer 2 fill"]);
            assert_eq!(timed.stats.passes, 3);
            let sum: f64 = timed.dispatches.iter().map(|(_, _, us)| us).sum();
            assert!(sum > 0.0 && sum <= f64::from(timed.gpu_us.unwrap()) + 1.0, "{timed:?}");
            let kernels = kvasir::telemetry::kernels::by_kernel(
                timed.dispatches.iter().map(|(kernel, label, us)| (kernel.as_str(), label.as_str(), *us)),
            );
            assert_eq!((kernels.len(), kernels[0].dispatches, kernels[0].purpose.as_str()), (1, 3, "fill"));
        } else {
            assert!(names.is_empty());
        }
        replayer.set_profiling(false);
        let submitted = replayer.submit(&rig.gpu, &recording, &[]).unwrap();
        let plain = replayer.wait(&rig.gpu, submitted).unwrap();
        assert_eq!((plain.dispatches.len(), plain.stats.passes), (0, 1));
    }
}

#[test]
fn allocations_are_counted_and_refused_without_a_fault() {
    for rig in rigs() {
        // Other tests allocate on the same device at the same time, so look at a device of its own.
        let floor = rig.name.contains("floor");
        let gpu =
            Gpu::open(&GpuRequest { backend: None, adapter: None, floor, checked_shaders: true, matrix_units: false })
                .unwrap();
        let buffer = gpu.alloc("a", 1000, BufferUse::Storage).unwrap();
        assert_eq!(gpu.allocated_bytes(), 1000);
        let clone = buffer.clone();
        drop(buffer);
        assert_eq!(gpu.allocated_bytes(), 1000);
        drop(clone);
        assert_eq!(gpu.allocated_bytes(), 0);
        let error = gpu.alloc("too much", u64::MAX / 2, BufferUse::Storage).unwrap_err();
        assert!(matches!(error, GpuError::OutOfMemory { .. }), "{error}");
        assert_eq!(gpu.check(), Ok(()));
    }
}

#[test]
fn uploads_larger_than_the_staging_arrive_whole() {
    let Some(rig) = rigs().first() else { return };
    let words: Vec<u32> = (0..20 << 20).collect(); // 80 MiB: five pieces, one flush on the way
    let buffer = rig.gpu.alloc("weights", 80 << 20, BufferUse::Storage).unwrap();
    let mut uploader = Uploader::new(&rig.gpu);
    uploader.write(&buffer.whole(), bytemuck::cast_slice(&words)).unwrap();
    uploader.flush().unwrap();
    assert!(rig.read::<u32>(&buffer) == words);
}

#[test]
fn mistakes_in_kernels_and_bindings_are_errors() {
    for rig in rigs() {
        let none = Defines::new();
        let broken: Stitched = kvasir::gpu::shader::stitch_text(
            "broken",
            "@compute @workgroup_size(1)\nfn main() { x = 1; }",
            &none,
            &|_| None,
        )
        .unwrap();
        let error = rig.gpu.compile(&broken, &none).unwrap_err();
        assert!(error.to_string().contains("kernels/broken.wgsl:2"), "{error}");
        assert!(matches!(rig.gpu.kernel("missing", &none).unwrap_err(), GpuError::Shader(_)));

        let kernel = rig.kernel("fill", &none);
        let words = rig.upload("words", &[0u32; 64]);
        let params = rig.params(&FillParams { count: 64, value: 3 });
        let missing = rig.gpu.bind(&kernel, &[("words", &words.whole())]).unwrap_err();
        assert!(missing.to_string().contains("`params` must be given once"), "{missing}");
        let unknown = rig.gpu.bind(&kernel, &[("wrods", &words.whole()), ("params", &params)]).unwrap_err();
        assert!(unknown.to_string().contains("no binding `wrods`"), "{unknown}");
        let short = rig.gpu.bind(&kernel, &[("words", &words.whole()), ("params", &words.slice(0, 4))]).unwrap_err();
        assert!(matches!(short, GpuError::Validation { .. }), "{short}");
        assert_eq!(rig.gpu.check(), Ok(()), "a caught error must not poison the device");
    }
}

#[test]
fn unknown_adapters_are_refused_with_the_names_that_exist() {
    if rigs().is_empty() {
        return;
    }
    let request = GpuRequest {
        backend: None,
        adapter: Some("no such card".into()),
        floor: false,
        checked_shaders: false,
        matrix_units: false,
    };
    let error = Gpu::open(&request).unwrap_err();
    let first = &Gpu::adapters()[0];
    assert!(error.to_string().contains(&first.name), "{error}");
}

#[test]
fn subgroups_are_used_only_where_a_probe_saw_them() {
    // Whatever the driver reports (see LP_NATIVE_VECTOR_WIDTH of lavapipe), what is left is true.
    for rig in rigs() {
        let Some(size) = rig.gpu.caps().subgroup_size else { continue };
        let kernel = rig.kernel("subgroup_probe", &Defines::new().flag("SUBGROUP").set("SG", i64::from(size)));
        let seen = rig.upload("seen", &vec![0u32; 8 * size as usize]);
        rig.run(&kernel, &[("seen", &seen.whole())], 2);
        let words: Vec<[u32; 4]> = rig.read(&seen);
        assert!(words.iter().all(|w| w[2] == size && w[3] == size - 1), "{}: {words:?}", rig.name);
    }
}
