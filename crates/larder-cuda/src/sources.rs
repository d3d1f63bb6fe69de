//! The kernels' sources, each as one text: where they are compiled there may be nothing to include.

/// What the kernels share.
const COMMON: &str = include_str!("../kernels/common.cuh");

/// One of the sources.
#[derive(Clone, Copy)]
pub struct KernelSource {
    /// Its name in messages.
    pub file: &'static str,
    text: &'static str,
}

/// All of them. No two have kernels of one name.
pub const SOURCES: [KernelSource; 4] = [
    KernelSource { file: "blocks.cu", text: include_str!("../kernels/blocks.cu") },
    KernelSource { file: "floats.cu", text: include_str!("../kernels/floats.cu") },
    KernelSource { file: "elementwise.cu", text: include_str!("../kernels/elementwise.cu") },
    KernelSource { file: "attention.cu", text: include_str!("../kernels/attention.cu") },
];

impl KernelSource {
    /// With what it includes in the place of saying so.
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
    fn sources_are_whole() {
        for source in &SOURCES {
            let text = source.with_includes();
            assert!(!text.contains("#include") && !text.contains("#pragma once"), "{}", source.file);
            assert!(text.contains("struct ProductKernelArgs") && text.contains("__global__"), "{}", source.file);
        }
    }
}
