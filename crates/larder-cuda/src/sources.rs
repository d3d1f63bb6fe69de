//! The sources of the kernels, each as one text, because NVRTC may have no files to include.

/// The common part of all sources.
const COMMON: &str = include_str!("../kernels/common.cuh");

/// One source file.
#[derive(Clone, Copy)]
pub struct KernelSource {
    /// Name of the file in messages.
    pub file: &'static str,
    text: &'static str,
}

/// Every source. Names of kernels are unique across sources.
pub const SOURCES: [KernelSource; 5] = [
    KernelSource { file: "blocks.cu", text: include_str!("../kernels/blocks.cu") },
    KernelSource { file: "floats.cu", text: include_str!("../kernels/floats.cu") },
    KernelSource { file: "elementwise.cu", text: include_str!("../kernels/elementwise.cu") },
    KernelSource { file: "rows.cu", text: include_str!("../kernels/rows.cu") },
    KernelSource { file: "attention.cu", text: include_str!("../kernels/attention.cu") },
];

impl KernelSource {
    /// The text with `#include "common.cuh"` replaced by the contents of that file.
    pub fn with_includes(&self) -> String {
        let common: String =
            COMMON.lines().filter(|line| *line != "#pragma once").map(|line| format!("{line}\n")).collect();
        self.text.replace("#include \"common.cuh\"", &common)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn includes_are_expanded() {
        for source in &SOURCES {
            let text = source.with_includes();
            assert!(!text.contains("#include") && !text.contains("#pragma once"), "{}", source.file);
            assert!(text.contains("struct ProductKernelArgs") && text.contains("__global__"), "{}", source.file);
        }
    }
}
