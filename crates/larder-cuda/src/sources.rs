//! The kernels' sources, each as one text: where they are compiled there may be nothing to include.

/// What the kernels share.
const COMMON: &str = include_str!("../kernels/common.cuh");

/// One of the sources.
#[derive(Clone, Copy)]
pub struct Source {
    /// Its name in messages.
    pub file: &'static str,
    text: &'static str,
}

/// All of them. No two have kernels of one name.
pub const SOURCES: [Source; 4] = [
    Source { file: "blocks.cu", text: include_str!("../kernels/blocks.cu") },
    Source { file: "floats.cu", text: include_str!("../kernels/floats.cu") },
    Source { file: "between.cu", text: include_str!("../kernels/between.cu") },
    Source { file: "attention.cu", text: include_str!("../kernels/attention.cu") },
];

impl Source {
    /// With what it includes in the place of saying so.
    pub fn whole(&self) -> String {
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
            let text = source.whole();
            assert!(!text.contains("#include") && !text.contains("#pragma once"), "{}", source.file);
            assert!(text.contains("struct Product") && text.contains("__global__"), "{}", source.file);
        }
    }
}
