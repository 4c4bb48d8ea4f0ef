//! Which family of adapters one belongs to: the first row of a table whose needs it meets, by what was probed.
//!
//! A row says which kernels its adapters get, and how they begin where several ways give the same bits. Names of vendors
//! play no part. A new class is a new row.

use super::Class;
use crate::gpu::GpuCaps;

/// A row of the table.
#[derive(Debug)]
pub struct DeviceClass {
    /// One word, for files and tools.
    pub name: &'static str,
    /// What an adapter of this class has, in words.
    pub has: &'static str,
    /// Which kernels it gets, in words.
    pub kernels: &'static str,
    is_met: fn(&GpuCaps) -> bool,
    /// 4-bit weights are multiplied in pairs, where the packed dot product is many instructions.
    pub multiplies_pairs: bool,
    /// Workgroups that run at the same time. `None` is one for each core; what a graphics card has, no interface tells,
    /// and most have room for more than is written here.
    pub parallel: Option<u32>,
}

const LANES: &str = "one subgroup for each workgroup, without barriers";
const TREES: &str = "WebGPU's default limits, with workgroup memory";

/// The first row that fits is taken; the last fits all.
pub const DEVICE_CLASSES: [DeviceClass; 5] = [
    DeviceClass {
        name: "cpu",
        has: "software on the CPU, subgroups",
        kernels: LANES,
        is_met: |caps| caps.is_cpu && caps.subgroup_size.is_some(),
        multiplies_pairs: true,
        parallel: None,
    },
    DeviceClass {
        name: "cpu-floor",
        has: "software on the CPU",
        kernels: TREES,
        is_met: |caps| caps.is_cpu,
        multiplies_pairs: true,
        parallel: None,
    },
    DeviceClass {
        name: "coop16",
        has: "16 x 16 cooperative matrices of f16, subgroups",
        kernels: "those of the class subgroup; products of many tokens by cooperative matrices with --matrix-units",
        is_met: |caps| caps.matrix_side == Some(16) && caps.subgroup_size.is_some(),
        multiplies_pairs: false,
        parallel: Some(512),
    },
    DeviceClass {
        name: "subgroup",
        has: "subgroups of one size",
        kernels: LANES,
        is_met: |caps| caps.subgroup_size.is_some(),
        multiplies_pairs: false,
        parallel: Some(512),
    },
    DeviceClass {
        name: "floor",
        has: "no subgroups of one size",
        kernels: TREES,
        is_met: |_| true,
        multiplies_pairs: false,
        parallel: Some(512),
    },
];

impl DeviceClass {
    /// The class of an adapter.
    pub fn of(caps: &GpuCaps) -> &'static DeviceClass {
        DEVICE_CLASSES.iter().find(|class| (class.is_met)(caps)).expect("the last row fits all")
    }

    /// Why an adapter is in this class, and what follows, as a sentence.
    pub fn why(&self, caps: &GpuCaps) -> String {
        let lanes = caps.subgroup_size.map_or(String::new(), |lanes| format!(" (probed: {lanes} lanes)"));
        format!("{}{lanes}; kernels: {}", self.has, self.kernels)
    }

    /// Workgroups that the adapter runs at the same time.
    pub fn parallel_workgroups(&self) -> u32 {
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        self.parallel.unwrap_or_else(cores)
    }
}

impl Class {
    /// The shape of kernels that an adapter gets.
    pub fn of(caps: &GpuCaps) -> Class {
        match caps.subgroup_size {
            Some(size) if size.is_power_of_two() => Class::Subgroup(size),
            _ => Class::Floor,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_is_of_the_first_class_whose_needs_it_meets() {
        let caps = |is_cpu, subgroup_size, matrix_side| GpuCaps {
            name: String::new(),
            backend: String::new(),
            driver: String::new(),
            vendor: 0,
            device: 0,
            is_cpu,
            subgroup_size,
            matrix_side,
            has_timestamps: false,
            max_binding_bytes: 1 << 27,
            max_buffer_bytes: 1 << 28,
            max_storage_buffers: 8,
            slice_align: 256,
            prefers_texels: false,
        };
        let check = |caps: GpuCaps, want: &str| assert_eq!(DeviceClass::of(&caps).name, want, "{caps:?}");
        check(caps(true, Some(8), Some(8)), "cpu");
        check(caps(true, None, None), "cpu-floor");
        check(caps(false, Some(32), Some(16)), "coop16");
        check(caps(false, None, Some(16)), "floor");
        check(caps(false, Some(64), None), "subgroup");
        check(caps(false, Some(32), Some(8)), "subgroup");
        check(caps(false, None, None), "floor");
        let why = DeviceClass::of(&caps(false, Some(32), Some(16))).why(&caps(false, Some(32), Some(16)));
        assert!(why.contains("probed: 32 lanes") && why.contains("class subgroup"), "{why}");
    }

    #[test]
    fn names_of_classes_differ_and_the_last_class_takes_any_adapter() {
        let mut names: Vec<&str> = DEVICE_CLASSES.iter().map(|class| class.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), DEVICE_CLASSES.len());
    }
}
