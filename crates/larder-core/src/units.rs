//! Sizes in bytes as text.

/// Parses a size in bytes: `4G`, `1.5 GiB`, `512 MB`. Units are decimal, except those with an `i`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim_start();
    let factor: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" => 1000,
        "m" | "mb" => 1000_u64.pow(2),
        "g" | "gb" => 1000_u64.pow(3),
        "t" | "tb" => 1000_u64.pow(4),
        "ki" | "kib" => 1 << 10,
        "mi" | "mib" => 1 << 20,
        "gi" | "gib" => 1 << 30,
        "ti" | "tib" => 1 << 40,
        _ if number.is_empty() => return Err("is not a size such as 4G or 512MiB".into()),
        _ => return Err(format!("'{unit}' is not a unit of memory; use G, M, GiB or MiB")),
    };
    match number.parse::<f64>() {
        Ok(n) if n >= 0.0 => Ok((n * factor as f64) as u64),
        _ => Err("is not a size such as 4G or 512MiB".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_decimal_except_those_with_an_i() {
        assert_eq!(parse_bytes("4G"), Ok(4_000_000_000));
        assert_eq!(parse_bytes("1.5GiB"), Ok(3 << 29));
        assert_eq!(parse_bytes(" 512 m "), Ok(512_000_000));
        assert_eq!(parse_bytes("77"), Ok(77));
        for wrong in ["4X", "G", "-1G", "", "4 G B", "1.2.3M"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }
}
